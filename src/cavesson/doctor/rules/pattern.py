"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections import Counter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.groups import within
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.series import Array, since

PIECES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]+")
"""Words, the signs of languages that write without spaces, and runs of other signs."""
MIN_ROLLOUTS = 60
FREQUENT = 0.2
GROWTH = 3.0


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
    """Share of the variance of the reward within a prompt or step that having it explains."""


def pieces(text: str | None) -> set[str]:
    """Return the words, the signs and the pairs of adjacent ones in a text, in lower case."""
    words = [word if word[0].isalnum() or word[0] == "_" else word[:3] for word in PIECES.findall((text or "").lower())]
    return {*words, *(f"{one} {two}" for one, two in pairwise(words))}


def spreading(rows: Rows) -> list[Pattern]:
    """Return the patterns that became more frequent, sorted by how much of the reward they explain."""
    found = [pieces(text) for text in rows.texts("response")]
    early, late = rows.step <= np.quantile(rows.steps, 0.15), _late(rows)
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
            explained = _explained(within(rows, has.astype(float)), reward)
            patterns.append(Pattern(text, before, after, float(odds / error), lift, explained))
    return sorted(patterns, key=lambda pattern: (-pattern.explains, pattern.text))


def _explained(has: Array, reward: Array) -> float:
    known = np.isfinite(reward)
    if np.std(has[known]) < 1e-9 or np.std(reward[known]) < 1e-9:
        return 0.0
    return float(np.corrcoef(has[known], reward[known])[0, 1]) ** 2


def _late(rows: Rows) -> Array:
    return np.asarray(rows.step >= np.quantile(rows.steps, 0.8))


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
    source="LMFlow's RAFT (#); StackLLaMA (```); own threshold",
    explains=["distinct-collapse", "over-optimised", "entropy-collapse", "kl-in-few-tokens", "template-collapse",
              "repetition-loops", "kl-explosion", "reward-exhausted", "one-part-dominates"],
)  # fmt: skip
def pattern_spreading(data: RunData, *, limit: float = Share(0.12)) -> Reading | None:
    rows = data.sample.rows
    if len(rows) < 2 * MIN_ROLLOUTS:
        return None
    found = [pattern for pattern in spreading(rows) if pattern.lift > 0]
    # A desired property has many words, each of which explains only some hundredths of the variance.
    if not found or found[0].explains < limit:
        return Reading(Share(found[0].explains if found else 0.0), False)
    best = found[0]
    has = np.array([best.text in pieces(text) for text in rows.texts("response")])
    share = rows.by_step(has.astype(float))
    first = since(share, share.value > max(2 * best.before, 0.1), 3)
    words: Words = {"pattern": best.text, "lift": best.lift, "before": Share(best.before), "after": Share(best.after)}
    shown = np.flatnonzero(has & _late(rows))
    evidence = rows.evidence(shown[np.argsort(-np.nan_to_num(rows["reward"][shown]))])
    curve = Curve(share, high=max(FREQUENT, GROWTH * best.before), name=Phrase("share of responses with the pattern"))
    return Reading(Share(best.explains), True, first, evidence, words, curve)
