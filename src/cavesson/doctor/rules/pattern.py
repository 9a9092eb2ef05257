"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Evidence, Phrase, Reading, Share, Words
from cavesson.doctor.groups import within
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, since

PIECES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]+")
"""Words, the signs of languages that write without spaces, and runs of other signs."""
LEAST_ROLLOUTS = 60
FREQUENT = 0.2
GROWTH = 3.0
DECIDES = 0.12
"""Share of the reward's differences above which a reward is about one pattern: what is rightly liked has many words,
each of which explains some hundredths."""


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
    decides: float
    """Share of the variance of the reward within a prompt or step that having it explains."""


def pieces(text: str | None) -> set[str]:
    """Return the words, the signs and the pairs of adjacent ones in a text, in lower case."""
    words = [word if word[0].isalnum() or word[0] == "_" else word[:3] for word in PIECES.findall((text or "").lower())]
    return {*words, *(f"{one} {two}" for one, two in pairwise(words))}


def spreading(rows: Rows) -> list[Pattern]:
    """Return the patterns that became more frequent, sorted by how much of the reward they explain."""
    found = [pieces(text) for text in rows.texts("response")]
    early, late = _early(rows), _late(rows)
    if early.sum() < LEAST_ROLLOUTS / 2 or late.sum() < LEAST_ROLLOUTS / 2:
        return []
    old, new = (_frequencies(found[i] for i in np.flatnonzero(part)) for part in (early, late))
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
            decides = _explained(within(rows, has.astype(float)), reward)
            patterns.append(Pattern(text, before, after, float(odds / error), lift, decides))
    return sorted(patterns, key=lambda pattern: (-pattern.decides, pattern.text))


def _explained(has: Array, reward: Array) -> float:
    known = np.isfinite(reward)
    if np.std(has[known]) < 1e-9 or np.std(reward[known]) < 1e-9:
        return 0.0
    return float(np.corrcoef(has[known], reward[known])[0, 1]) ** 2


def _early(rows: Rows) -> Array:
    return np.asarray(rows.step <= np.quantile(rows.steps, 0.15))


def _late(rows: Rows) -> Array:
    return np.asarray(rows.step >= np.quantile(rows.steps, 0.8))


def _frequencies(texts: Iterable[set[str]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for some in texts:
        found.update(some)
    return found


@rule(
    row=50,
    needs=["rows.response", "rows.reward"],
    least_steps=8,
    title="A pattern spreads that the reward likes",
    cause="`{pattern}` stands in {after} of the last responses and stood in {before} of the first. Responses with it "
    "earn {lift} standard deviations more, and whether they have it decides {seen} of the reward: the policy has found "
    "what the reward falls for.",
    healthy="share of the reward's variance within a prompt that a spreading pattern explains: below 12 %",
    fix="discard such responses (cleaning.discard) or penalise them, and train the reward model on examples",
    source="LMFlow's RAFT (#); StackLLaMA (```); own threshold",
    explains=["distinct-collapse", "over-optimised", "entropy-collapse", "kl-in-few-tokens", "template-collapse",
              "repetition-loops", "kl-explosion", "reward-exhausted", "one-part-dominates"],
)  # fmt: skip
def pattern_spreading(data: RunData) -> Reading | None:
    rows = data.sample.rows
    if len(rows) < 2 * LEAST_ROLLOUTS:
        return None
    found = [pattern for pattern in spreading(rows) if pattern.lift > 0]
    if not found or found[0].decides < DECIDES:
        return Reading(Share(found[0].decides if found else 0.0), False)
    best = found[0]
    has = np.array([best.text in pieces(text) for text in rows.texts("response")])
    share = rows.by_step(has.astype(float))
    first = since(share, share.value > max(2 * best.before, 0.1), 3)
    words: Words = {
        "pattern": best.text, "before": Share(best.before), "after": Share(best.after), "lift": best.lift
    }  # fmt: skip
    evidence = _places(data.sample, np.flatnonzero(has & _late(rows)))
    curve = Curve(share, high=max(FREQUENT, GROWTH * best.before), name=Phrase("share of responses with the pattern"))
    return Reading(Share(best.decides), True, first, evidence, words, curve=curve)


def _places(sample: Sample, rollouts: Array) -> tuple[Evidence, ...]:
    order = rollouts[np.argsort(-np.nan_to_num(sample.rows["reward"][rollouts]))]
    return sample.evidence(order)
