"""The rule on environments whose episodes are not independent of each other."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
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
from cavesson.text.words import contains, is_sign

SHORT, SHORT_NUMBER = 3, 2
"""Characters from which a word, and a number, can say which row it is of."""
MIN_GROUPS, MIN_PROMPTS = 20, 20
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
    unhealthy = leak.amount > limit and leak.chance < SURE
    since = int(rows.steps[0])
    return Reading(leak.amount, unhealthy, since, leak.evidence, {"what": leak.what, "chance": leak.chance})


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
    """Return [n] numbers of what the policy says last and of the right answer, equal where both are.

    Of answers that occur once, only whether they contain the right one counts: their mean would be their reward.
    """
    said = [(spoken[-1:] or [""])[0] for spoken in turns.spoken]
    pairs = list(zip(said, (truth or "" for truth in turns.rows.texts("ground_truth")), strict=True))
    often = Counter(pairs)
    numbers: dict[tuple[str, str] | bool, int] = {}
    keys = (pair if often[pair] > 1 else pair[1] != "" and contains(*pair) for pair in pairs)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


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
    """Measure whether results have words of the prompt before in a step more often than of the prompt behind.

    Results of one prompt are alike, so that each prompt counts once.
    """
    rows, said, results = turns.rows, _words_of_episodes(turns), _results(turns)
    asked = _words(rows, rows.texts("prompt"))
    leaked, earlier_only, later_only = list[int](), 0, 0
    for step in rows.steps.tolist():
        lines = np.flatnonzero(rows.step == step)
        groups = list(dict.fromkeys(rows.group[lines[np.argsort(rows.sample[lines])]].tolist()))
        of = {group: lines[rows.group[lines] == group].tolist() for group in groups}
        words = {group: set[str]().union(*(said[line] | asked[line] for line in of[group])) for group in groups}
        for before, own, behind in zip(groups, groups[1:], groups[2:], strict=False):
            earlier, later = words[before] - words[behind] - words[own], words[behind] - words[before] - words[own]
            found = [(bool(results[line] & earlier), bool(results[line] & later)) for line in of[own]]
            more = sum(one - other for one, other in found)
            earlier_only, later_only = earlier_only + (more > 0), later_only + (more < 0)
            leaked += [line for line, (one, other) in zip(of[own], found, strict=True) if one and not other]
    if earlier_only + later_only < MIN_PROMPTS:
        return None
    calling = len(np.unique(rows.group[[bool(words) for words in results]]))
    amount = max(earlier_only - later_only, 0) / calling
    what = Phrase("results of tools mention values of the prompt before, and not of the one behind")
    chance = at_least(earlier_only, earlier_only + later_only, 0.5)
    return _Leak(Share(amount), chance, what, rows.evidence(leaked))


def _of_rows(turns: Turns) -> _Leak | None:
    """Measure whether results say all of another row more often in the step of that row than in the step before.

    What a row says are the words of its prompt and its right answer that not many prompts have. If results were
    independent of the rows of others, either step would say a row as often (McNemar's test). Each row counts once, so
    that neither a result that says many rows nor a row that many results say decides; and only rows count whose words
    no other row of the two steps has, as these may be what that row rightly gets.
    """
    rows, results = turns.rows, _results(turns)
    said, group = _words_of_rows(rows), rows.group
    here_only, before_only, judged = list[int](), 0, 0
    for previous, step in pairwise(rows.steps.tolist()):
        here, before = np.flatnonzero(rows.step == step).tolist(), np.flatnonzero(rows.step == previous).tolist()
        for other in {group[line]: line for line in reversed(here)}.values():
            others = [line for line in here if group[line] != group[other]]
            if any(said[other] <= said[line] for line in (*others, *before)):
                continue
            judged += 1
            sayers, earlier = (_saying(said, results, other, lines) for lines in (others, before))
            here_only += sayers[:1] if not earlier else []
            before_only += bool(earlier) and not sayers
    if len(here_only) + before_only < MIN_PROMPTS:
        return None
    amount = max(len(here_only) - before_only, 0) / judged
    what = Phrase("results of tools say what other rows of their step do, and not what those of the next step do")
    chance = at_least(len(here_only), len(here_only) + before_only, 0.5)
    return _Leak(Share(amount), chance, what, rows.evidence(here_only))


def _saying(said: Sequence[set[str]], results: Sequence[set[str]], other: int, lines: Sequence[int]) -> list[int]:
    """Return those of some episodes whose results say all that another row says and their own row does not."""
    return [line for line in lines if said[other] - said[line] <= results[line]]


def _words(rows: Rows, texts: Sequence[str | None]) -> list[set[str]]:
    """Return the words of each text that are long enough to say which row they are of."""
    cut = rows.cut([text or "" for text in texts])
    return [{word for word in words if not is_sign(word) and _is_long(word)} for words in cut]


def _is_long(word: str) -> bool:
    return len(word) >= (SHORT_NUMBER if word.isdigit() else SHORT)


def _truths(rows: Rows) -> list[set[str]]:
    """Return [n] the words of each right answer; none where it is not recorded."""
    return _words(rows, rows.texts("ground_truth") if rows.recorded("ground_truth") else [None] * len(rows))


def _words_of_rows(rows: Rows) -> list[set[str]]:
    """Return [n] the words of each prompt and right answer, without those of many prompts."""
    asked = _words(rows, rows.texts("prompt"))
    count = Counter(word for words in asked for word in words)
    rare = {word for word, number in count.items() if number <= COMMON * len(rows)}
    return [(words & rare) | truth for words, truth in zip(asked, _truths(rows), strict=True)]


def _results(turns: Turns) -> list[set[str]]:
    """Return [n] the words in the results of each episode."""
    calls = np.flatnonzero(turns.role == "tool").tolist()
    texts = turns.texts("text")
    return _joined(turns, calls, [texts[call] for call in calls])


def _words_of_episodes(turns: Turns) -> list[set[str]]:
    """Return [n] the words in the right answer and in the arguments of each episode's calls."""
    given = _joined(turns, range(len(turns)), [_values(text) for text in turns.texts("arguments")])
    return [words | truth for words, truth in zip(given, _truths(turns.rows), strict=True)]


def _joined(turns: Turns, of: Sequence[int], texts: Sequence[str | None]) -> list[set[str]]:
    """Return [n] the words of each episode in the texts of some turns."""
    found: list[set[str]] = [set() for _ in range(len(turns.rows))]
    for turn, words in zip(of, _words(turns.rows, texts), strict=True):
        found[int(turns.line[turn])] |= words
    return found


def _values(arguments: str | None) -> str:
    """Return the values of a call's arguments as a text."""
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        return arguments or ""
    return " ".join(map(str, given.values())) if isinstance(given, dict) else str(given)
