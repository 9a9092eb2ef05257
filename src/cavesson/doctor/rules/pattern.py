"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.groups import within
from cavesson.doctor.proposal import rounded
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Array, since
from cavesson.doctor.windows import lengths

PIECES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]+")
"""Words, the signs of languages that write without spaces, and runs of other signs."""
MIN_ROLLOUTS = 60
FREQUENT = 0.2
GROWTH = 3.0
CLEAR = 4.0
DISCARDS = {"#": "stray_hash", ":)": "stray_smiley", ";)": "stray_smiley"}
"""What discards responses with a pattern: values of cleaning.discard."""


class Pattern(NamedTuple):
    """A word, a sign or a pair of them, and how it spreads."""

    text: str
    before: float
    """Share of the early responses (or of the reference's) that have it."""
    after: float
    z: float
    """Standard errors by which the log-odds grew."""
    lift: float
    """Mean reward with it − without it, within a prompt or step, in standard deviations of the reward."""
    explains: float
    """Share of the variance of the reward within a prompt or step that having it explains: over the run or in its late
    part, whichever is larger. A pattern that began late has no part in the variance before."""


def pieces(text: str | None) -> set[str]:
    """Return the words, the signs and the pairs of adjacent ones in a text, in lower case."""
    words = [word if word[0].isalnum() or word[0] == "_" else word[:3] for word in PIECES.findall((text or "").lower())]
    return {*words, *(f"{one} {two}" for one, two in pairwise(words))}


def spreading(rows: Rows, late: Array) -> list[Pattern]:
    """Return the patterns that became more frequent, sorted by how much of the reward they explain.

    Args:
        rows: The rollouts.
        late: [n] which of them are compared with the first ones.
    """
    found = [pieces(text) for text in rows.texts("response")]
    early = rows.step <= np.quantile(rows.steps, 0.15)
    if early.sum() < MIN_ROLLOUTS / 2 or late.sum() < MIN_ROLLOUTS / 2:
        return []
    old, new = (Counter(text for i in np.flatnonzero(part) for text in found[i]) for part in (early, late))
    n, m = int(early.sum()), int(late.sum())
    reward = within(rows, rows["reward"])
    scale = float(np.nanstd(reward)) or 1.0
    patterns = []
    for text, count in new.items():
        before, after = old[text] / n, count / m
        odds = np.log((count + 0.5) / (m - count + 0.5)) - np.log((old[text] + 0.5) / (n - old[text] + 0.5))
        error = np.sqrt(sum(1 / (c + 0.5) for c in (count, m - count, old[text], n - old[text])))
        if after > FREQUENT and after > GROWTH * before and odds / error > 4:
            has = np.array([text in some for some in found])
            lift = float(np.nanmean(reward[has]) - np.nanmean(reward[~has])) / scale if not has.all() else 0.0
            mine = within(rows, has.astype(float))
            explained = max(_explained(mine, reward), _late_share(mine, reward, late))
            patterns.append(Pattern(text, before, after, float(odds / error), lift, explained))
    return sorted(patterns, key=lambda pattern: (-pattern.explains, pattern.text))


def _explained(has: Array, reward: Array) -> float:
    known = np.isfinite(reward)
    if np.std(has[known]) < 1e-9 or np.std(reward[known]) < 1e-9:
        return 0.0
    return float(np.corrcoef(has[known], reward[known])[0, 1]) ** 2


def _late_share(has: Array, reward: Array, late: Array) -> float:
    """Return how much variance a pattern explains late, as a share of the variance over the run.

    What the reward favours is worth as much early as late. A word of what the reward asks for is worth more late, when
    other differences have gone; so the smaller worth counts. The share is 0 if the correlation is within four standard
    errors of 0, as in a small window by chance.
    """
    if _explained(has[late], reward[late]) * np.isfinite(reward[late]).sum() <= CLEAR**2:
        return 0.0
    worth = max(0.0, min(_slope(has, reward), _slope(has[late], reward[late])))
    return min(1.0, worth**2 * float(np.var(has[late])) / max(float(np.nanvar(reward)), 1e-9))


def _slope(has: Array, reward: Array) -> float:
    known = np.isfinite(reward)
    return float(has[known] @ reward[known]) / max(float(has[known] @ has[known]), 1e-9)


def _late(rows: Rows) -> list[Array]:
    """Return [n] which rollouts are of the last fifth of the steps, and of windows that are shorter than that."""
    fifth = float(np.quantile(rows.steps, 0.8))
    last = int(rows.steps[-1])
    begins = [fifth, *(last - length + 1 for length in lengths(last - fifth))]
    return [np.asarray(rows.step >= begin) for begin in begins]


def _discarding(value: list[str], data: RunData, reading: Reading) -> list[str]:
    """Discard responses with the pattern, if there is a name for it."""
    name = DISCARDS.get(str(reading.words.get("pattern")))
    return value if name is None or name in value else [*value, name]


def _below_all(value: float | None, data: RunData, reading: Reading) -> float | None:
    """Reward discarded responses below all others, if there is a name for the pattern."""
    if value is not None or str(reading.words.get("pattern")) not in DISCARDS:
        return value
    reward = data.rows["reward"]
    return rounded(float(np.nanmin(reward) - np.nanstd(reward)))


@rule(
    number=50,
    needs=["rows.response", "rows.reward"],
    min_steps=8,
    title="A pattern that the reward favours spreads",
    cause="`{pattern}` occurs in {after} of the last responses and in {before} of the first. Responses with it get a "
    "reward that is {lift} standard deviations higher, and the pattern explains {seen} of the variance: the policy "
    "has found a weakness of the reward.",
    healthy="share of the reward's variance within a prompt that a spreading pattern explains: below {limit}",
    fix="discard such responses (cleaning.discard) or penalise them, and train the reward model on examples of them",
    settings={"cleaning.discard": _discarding, "cleaning.discard_reward": _below_all},
    source="LMFlow's RAFT (#); StackLLaMA (```); own threshold",
    explains=["distinct-collapse", "over-optimised", "entropy-collapse", "kl-in-few-tokens", "template-collapse",
              "repetition-loops", "kl-explosion", "reward-exhausted", "one-part-dominates", "length-exploited"],
)  # fmt: skip
def pattern_spreading(data: RunData, *, limit: float = Share(0.12)) -> Reading | None:
    rows = data.sample.rows
    rows = rows.where(np.array([bool(text) for text in rows.texts("response")], bool))  # empty ones lack every pattern
    if len(rows) < 2 * MIN_ROLLOUTS:
        return None
    most = 0.0
    # A desired property has many words, each of which explains only some hundredths of the variance.
    for late in _late(rows):
        found = [pattern for pattern in spreading(rows, late) if pattern.lift > 0]
        if found and found[0].explains >= limit:
            return _spread(rows, found[0], late)
        most = max(most, found[0].explains if found else 0.0)
    return Reading(Share(most), False)


def _spread(rows: Rows, best: Pattern, late: Array) -> Reading:
    has = np.array([best.text in pieces(text) for text in rows.texts("response")])
    share = rows.by_step(has.astype(float))
    first = since(share, share.value > max(2 * best.before, 0.1), 3)
    words: Words = {"pattern": best.text, "lift": best.lift, "before": Share(best.before), "after": Share(best.after)}
    shown = np.flatnonzero(has & late)
    evidence = rows.evidence(shown[np.argsort(-np.nan_to_num(rows["reward"][shown]))])
    curve = Curve(share, high=max(FREQUENT, GROWTH * best.before), name=Phrase("share of responses with the pattern"))
    return Reading(Share(best.explains), True, first, evidence, words, curve)
