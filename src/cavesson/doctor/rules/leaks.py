"""The rule on environments whose episodes are not independent of each other."""

import json
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from cavesson.doctor.absent import no_turns
from cavesson.doctor.data import RunData
from cavesson.doctor.groups import mean_of
from cavesson.doctor.reading import Reading
from cavesson.doctor.readings import DIGITS, at_least
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Array
from cavesson.doctor.turns import Turns
from cavesson.findings.finding import Evidence
from cavesson.findings.words import Phrase, Share

WORD = re.compile(r"[^\W_]{3,}|\d{2,}")
MIN_GROUPS, MIN_PAIRS = 20, 20
SURE = 1e-4
"""Probability by chance below which an order is not chance. Runs have many ways to be ordered a little."""
COMMON = 0.3
"""A word in more than this share of the prompts does not identify a row."""
ORDER = 4.0
"""Standard errors from which lengths are ordered, too, so that the trainer may have sorted the rollouts."""


class _Leak(NamedTuple):
    """How much something depends on the order of the rollouts in a step."""

    amount: float
    chance: float
    """The probability of as much or more by chance."""
    what: Phrase
    evidence: tuple[Evidence, ...]


@rule(
    number=87,
    needs=["turns.role"],
    training_only=True,
    title="The environment leaks state between rollouts",
    cause="{what} ({seen}; by chance with a probability of {chance}): something of one episode is still there in the "
    "next ones, such as a class attribute, a global, a file or a server's session.",
    healthy="dependence on the order of the rollouts in a step, from 0 to 1: below {limit}, or explained by chance",
    fix="set everything anew in reset, on the instance and never on the class or the module; give each episode its own "
    "session, folder or random generator",
    source="TRL (environment_factory); OpenEnv",
    explains=[
        "reward-is-noise",
        "reward-ignores-results",
        "value-not-fitting",
        "zero-variance-groups",
        "prompts-exhausted",
    ],
    absent=no_turns,
)
def environment_leaks(data: RunData, *, limit: float = 0.05) -> Reading | None:
    turns, rows = data.turns, data.turns.rows
    tested = [_of_rewards(data, turns), _of_results(turns), _of_values(turns), _of_rows(turns)]
    found = [one for one in tested if one is not None]
    if not found:
        return None
    leak = max(found, key=lambda one: (one.amount > limit and one.chance < SURE, one.amount))
    sick = leak.amount > limit and leak.chance < SURE
    since = int(rows.steps[0])
    return Reading(leak.amount, sick, since, leak.evidence, {"what": leak.what, "chance": leak.chance})


def _of_rewards(data: RunData, turns: Turns) -> _Leak | None:
    """Measure whether rewards of one prompt's episodes rise or fall with the order in which they were sampled.

    Where the right answer is recorded, the mean reward of each answer is subtracted: it does not depend on the order.
    """
    rows = turns.rows
    reward = rows["reward"]
    if rows.recorded("ground_truth"):
        reward = np.round(reward - mean_of(_answer_and_truth(turns), reward), DIGITS)
    found = _order(rows.group, rows.sample, reward)
    if found is None:
        return None
    amount, score = found
    ordered = None if data.own else _order(rows.group, rows.sample, rows["length"])
    if ordered is not None and abs(ordered[1]) > ORDER:
        return None
    what = Phrase("of the episodes of one prompt, later ones get higher rewards")
    if amount < 0:
        what = Phrase("of the episodes of one prompt, later ones get lower rewards")
    return _Leak(abs(amount), _two_sided(score), what, rows.evidence(np.flatnonzero(np.isfinite(reward))))


def _answer_and_truth(turns: Turns) -> Array:
    """Return [n] numbers of what the policy says last and of the right answer, equal where both are."""
    numbers: dict[tuple[str | None, str | None], int] = {}
    pairs = zip((said[-1] if said else None for said in turns.spoken), turns.rows.texts("ground_truth"), strict=True)
    return np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs], np.int64)


def _of_results(turns: Turns) -> _Leak | None:
    """Measure whether the result of the same call of the same prompt grows with the order of the episodes."""
    texts, names, arguments = turns.texts("text"), turns.texts("name"), turns.texts("arguments")
    before: dict[int, tuple[object, ...]] = defaultdict(tuple)
    strata: dict[tuple[object, ...], int] = {}
    key, calls = [], []
    for call in np.flatnonzero((turns.role == "tool") & ~turns.failed).tolist():
        line = int(turns.line[call])
        said = (int(turns.rows.group[line]), before[line], names[call], arguments[call])
        before[line] = (*before[line], names[call], arguments[call])
        key.append(strata.setdefault(said, len(strata)))
        calls.append(call)
    length = np.array([len(texts[call] or "") for call in calls], float)
    found = _order(np.array(key, int), turns.rows.sample[turns.line[calls]], length)
    if found is None:
        return None
    what = Phrase("the same call of the same prompt returns more in later episodes of a step")
    return _Leak(max(found[0], 0.0), _two_sided(found[1]), what, turns.evidence(np.array(calls, int)))


def _order(key: Array, sample: Array, values: Array) -> tuple[float, float] | None:
    """Return how strongly values rise with the sample within each key, from −1 to 1, and in standard errors of chance.

    If values were independent of the order, each order of them would be equally likely: the sum of products of ranks
    and values has mean 0 and, by the variance of a permutation, the variance Σ SSx·SSy / (n − 1).
    """
    there = np.isfinite(values)
    key, sample, values = key[there], sample[there], values[there]
    order = np.lexsort((sample, key))
    begins = np.append(np.flatnonzero(np.diff(key[order], prepend=-1)), len(order))
    products, scale, variance, count = 0.0, 0.0, 0.0, 0
    for first, stop in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True):
        y = values[order[first:stop]]
        if len(y) < 3 or y.max() == y.min():
            continue
        x, y = np.arange(len(y)) - (len(y) - 1) / 2, (y - y.mean()) / y.std()
        squares = float(x @ x) * float(y @ y)
        products, scale = products + float(x @ y), scale + squares**0.5
        variance, count = variance + squares / (len(y) - 1), count + 1
    return (products / scale, products / variance**0.5) if count >= MIN_GROUPS else None


def _two_sided(score: float) -> float:
    from scipy import special  # slow to import; only runs with turns need it

    return float(2 * special.ndtr(-abs(score)))


def _of_values(turns: Turns) -> _Leak | None:
    """Measure whether results have words of the prompt before in a step more often than of the prompt behind."""
    rows, said, results = turns.rows, _words_of_episodes(turns), _results(turns)
    leaked, reverse = [], 0
    asked = [set(WORD.findall(text or "")) for text in rows.texts("prompt")]
    for step in rows.steps.tolist():
        lines = np.flatnonzero(rows.step == step)
        groups = list(dict.fromkeys(rows.group[lines[np.argsort(rows.sample[lines])]].tolist()))
        of = {group: lines[rows.group[lines] == group].tolist() for group in groups}
        words = {group: set[str]().union(*(said[line] | asked[line] for line in of[group])) for group in groups}
        for before, own, behind in zip(groups, groups[1:], groups[2:], strict=False):
            earlier, later = words[before] - words[behind] - words[own], words[behind] - words[before] - words[own]
            for line in of[own]:
                has_earlier, has_later = bool(results[line] & earlier), bool(results[line] & later)
                reverse += has_later and not has_earlier
                leaked += [line] if has_earlier and not has_later else []
    pairs, calling = len(leaked) + reverse, sum(map(bool, results))
    if pairs < MIN_PAIRS:
        return None
    amount = max(len(leaked) - reverse, 0) / calling
    what = Phrase("results of tools mention values of the prompt before, and not of the one behind")
    return _Leak(Share(amount), at_least(len(leaked), pairs, 0.5), what, rows.evidence(leaked))


def _of_rows(turns: Turns) -> _Leak | None:
    """Measure whether results say all of another row more often if it is of the same step than of the next one.

    What a row says are the words of its prompt and its right answer that not many prompts have. Each pair of prompts
    counts once.
    """
    rows, results = turns.rows, _results(turns)
    groups = list(dict.fromkeys(rows.group.tolist()))
    first = {group: line for line, group in reversed(list(enumerate(rows.group.tolist())))}
    said = _words_of_rows(rows)
    of_step = {step: [group for group in groups if rows.step[first[group]] == step] for step in rows.steps.tolist()}
    same, following = set[tuple[int, int]](), set[tuple[int, int]]()
    evidence: dict[tuple[int, int], int] = {}
    after = dict(zip(rows.steps[:-1].tolist(), rows.steps[1:].tolist(), strict=True))
    for line, (step, own) in enumerate(zip(rows.step.tolist(), rows.group.tolist(), strict=True)):
        for pairs, others in ((same, of_step[step]), (following, of_step.get(after.get(step, -1), []))):
            for other in others if results[line] and step in after else []:
                foreign = said[first[other]] - said[line]
                if foreign and foreign <= results[line]:
                    pairs.add((own, other))
                    evidence.setdefault((own, other), line)
    if len(same) + len(following) < MIN_PAIRS:
        return None
    amount = max(len(same) - len(following), 0) / len(groups)
    what = Phrase("results of tools say what other rows of their step do, and not what those of the next step do")
    chance = at_least(len(same), len(same) + len(following), 0.5)
    return _Leak(Share(amount), chance, what, rows.evidence(evidence[pair] for pair in sorted(same)))


def _words_of_rows(rows: Rows) -> list[set[str]]:
    """Return [n] the words of each prompt and right answer, without those of many prompts."""
    truth = rows.texts("ground_truth") if rows.recorded("ground_truth") else [None] * len(rows)
    asked = [set(WORD.findall(text or "")) for text in rows.texts("prompt")]
    count = Counter(word for words in asked for word in words)
    rare = {word for word, number in count.items() if number <= COMMON * len(rows)}
    return [(words & rare) | set(WORD.findall(one or "")) for words, one in zip(asked, truth, strict=True)]


def _results(turns: Turns) -> list[set[str]]:
    """Return [n] the words in the results of each episode."""
    found: list[set[str]] = [set() for _ in range(len(turns.rows))]
    texts = turns.texts("text")
    for call in np.flatnonzero(turns.role == "tool").tolist():
        found[int(turns.line[call])].update(WORD.findall(texts[call] or ""))
    return found


def _words_of_episodes(turns: Turns) -> list[set[str]]:
    """Return [n] the words in the right answer and in the arguments of each episode's calls."""
    truth = turns.rows.texts("ground_truth") if turns.rows.recorded("ground_truth") else [None] * len(turns.rows)
    found = [set(WORD.findall(one or "")) for one in truth]
    for line, text in zip(turns.line.tolist(), turns.texts("arguments"), strict=True):
        found[line].update(WORD.findall(_values(text)))
    return found


def _values(arguments: str | None) -> str:
    """Return the values of a call's arguments as a text."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        return arguments or ""
    return " ".join(map(str, given.values())) if isinstance(given, dict) else str(given)
