"""The rule on a pattern that spreads because the reward favours it, such as `#`, an emoticon or a phrase."""

import re
from collections import Counter
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import CHANCE, RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.groups import mean_of, within
from cavesson.doctor.proposal import rounded
from cavesson.doctor.rows import Rows
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC
from cavesson.doctor.series import Array, since
from cavesson.doctor.windows import lengths

PIECES = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]+")
"""Words, the signs of languages that write without spaces, and runs of other signs."""
MIN_ROLLOUTS = 60
FREQUENT = 0.2
GROWTH = 3.0
RECUR = 4
"""Responses to a prompt from which their mean is known."""
SEVERAL = 3
"""Other frequent words that are worth as much as a pattern, so that it is one of many that the reward asks for."""
EIGHTHS = np.arange(1, 8) / 8
"""Quantiles of the length between which responses are alike in length."""
LATER = 3.0
"""Standard errors by which a pattern must be worth more late than before."""
DISCARDS = {"#": "stray_hash", ":)": "stray_smiley", ";)": "stray_smiley"}
"""What discards responses with a pattern: values of cleaning.discard."""


class Pattern(NamedTuple):
    """A word, a sign or a pair of them, and how it spreads."""

    text: str
    before: float
    """Share of the early responses (or of the reference's) that have it."""
    after: float
    lift: float
    """Mean reward with it − without it, within a prompt or step, in standard deviations of the reward."""
    explains: float
    """Share of the variance of the reward within a prompt or step that having it explains: over the run or in its late
    part, whichever is larger. A pattern that began late has no part in the variance before."""


def pieces(text: str | None) -> set[str]:
    """Return the words, the signs and the pairs of adjacent ones in a text, in lower case."""
    return _with_pairs(_words(text))


def _with_pairs(words: list[str]) -> set[str]:
    return {*words, *(f"{one} {two}" for one, two in pairwise(words))}


def _words(text: str | None) -> list[str]:
    return [word if word[0].isalnum() or word[0] == "_" else word[:3] for word in PIECES.findall((text or "").lower())]


def spreading(rows: Rows, late: Array, chance: float = CHANCE) -> list[Pattern]:
    """Return the patterns that became more frequent, sorted by how much of the reward they explain.

    Args:
        rows: The rollouts.
        late: [n] which of them are compared with the first ones.
        chance: Probability with which any of the patterns may be returned, or said to explain something, by chance.
    """
    early, texts = rows.step <= np.quantile(rows.steps, 0.15), _Texts(rows)
    if early.sum() < MIN_ROLLOUTS / 2 or late.sum() < MIN_ROLLOUTS / 2:
        return []
    old, new = texts.counts(early), texts.counts(late)
    n, m = int(early.sum()), int(late.sum())
    frequent = [text for text, count in new.items() if count / m > FREQUENT]
    often = [text for text in frequent if new[text] / m > GROWTH * old[text] / n]
    grown = [text for text in often if texts.grows(text, early, late, _clear(chance, len(new)))]
    words = [text for text in frequent if " " not in text] if grown else []
    others = {text: texts.worth(text, _clear(chance, len(words))) for text in words}
    patterns = []
    for text in grown:
        worth = texts.worth(text, _clear(chance, len(grown)))
        equal = [name for name, other in others.items() if name not in text.split() and other.is_worth(worth.total)]
        if len(equal) < SEVERAL:  # otherwise the reward favours many words, which is what it asks for
            # The words of a pattern lengthen a response themselves. What it is worth must hold with and without them.
            among_others = texts.worth(text, _clear(chance, len(grown)), other=True)
            explains = min(worth.explained(late), among_others.explained(late))
            patterns.append(Pattern(text, old[text] / n, new[text] / m, texts.lift(text), explains))
    return sorted(patterns, key=lambda pattern: (-pattern.explains, pattern.text))


class _Texts:
    """The responses of rollouts and their rewards."""

    def __init__(self, rows: Rows) -> None:
        words = [_words(text) for text in rows.texts("response")]
        self._rows, self._found, self._prompt = rows, [_with_pairs(some) for some in words], _prompts(rows)
        self._reward = _compared(rows, rows["reward"], self._prompt)
        self._length = np.array([len(some) for some in words])

    def counts(self, part: Array) -> Counter[str]:
        """Return the number of responses with each pattern among those for which ``part`` [n] is true."""
        return Counter(text for i in np.flatnonzero(part) for text in self._found[i])

    def grows(self, text: str, early: Array, late: Array, clear: float) -> bool:
        """Return whether a pattern is more frequent late, by so many standard errors."""
        has = self._has(text)
        now, before = (share_of(has[part], self._prompt[part]) for part in (late, early))
        return bool(now.value - before.value > clear * np.hypot(now.error, before.error))

    def worth(self, text: str, clear: float, other: bool = False) -> "_Worth":
        """Return what a pattern is worth among responses of similar length, or with a similar number of other words."""
        has = self._has(text)
        length = self._length - has * len(text.split()) if other else self._length
        return _Worth(_compared(self._rows, has.astype(float), self._prompt), self._reward, length, self._prompt, clear)

    def lift(self, text: str) -> float:
        """Return the mean reward with a pattern − without it, in standard deviations of the reward."""
        has = self._has(text)
        if has.all():
            return 0.0
        difference = float(np.nanmean(self._reward[has]) - np.nanmean(self._reward[~has]))
        return difference / (float(np.nanstd(self._reward)) or 1.0)

    def _has(self, text: str) -> Array:
        return np.array([text in some for some in self._found])


def _clear(chance: float, patterns: int) -> float:
    """Return the standard errors that none of so many patterns exceeds by chance."""
    return NormalDist().inv_cdf(1 - chance / max(patterns, 1))


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


def share_of(has: Array, prompt: Array) -> Estimate:
    """Return the share of responses that have a pattern; responses to the same prompt are one observation."""
    share = float(has.mean())
    error = float(np.sqrt(np.sum(np.bincount(prompt, has - share) ** 2))) / len(has)
    smooth = (has.sum() + 0.5) / (len(has) + 1)  # a share of 0 or 1 is not certain either
    return Estimate(share, max(error, float(np.sqrt(smooth * (1 - smooth) / len(has)))))


def _prompts(rows: Rows) -> Array:
    """Return [n] the number of each rollout's prompt; each its own if prompts are not known."""
    key = rows["group"]
    alone = np.nanmax(key, initial=0.0) + 1 + np.arange(len(rows))
    return np.unique(np.where(np.isfinite(key), key, alone), return_inverse=True)[1]


def _compared(rows: Rows, values: Array, prompt: Array) -> Array:
    """Return [n] the values minus the mean of their group or step, and, where prompts recur, of their prompt.

    A prompt may earn more than others for reasons of its own, whatever its responses contain.
    """
    values = within(rows, values)
    recur = np.median(np.bincount(prompt)[prompt]) >= RECUR
    return np.asarray(values - mean_of(prompt, values)) if recur else values


class _Worth:
    """What a pattern is worth, beyond what the length of a response is worth.

    A longer response has more of everything: of `. the`, and of what the reward asks for.

    Args:
        has: [n] whether responses have the pattern, minus their means.
        reward: [n] minus its means, NaN where it is not known.
        length: [n] in words.
        prompt: [n] the number of each response's prompt.
        clear: Standard errors that a worth must exceed.
    """

    def __init__(self, has: Array, reward: Array, length: Array, prompt: Array, clear: float) -> None:
        self._known = np.isfinite(reward)
        self._has, self._reward, self._length, self._prompt, self._clear = has, reward, length, prompt, clear
        self._everywhere = np.ones(len(has), bool)
        self.total = self._slope(self._everywhere)
        """Of a response, over the run."""

    def is_worth(self, other: Estimate) -> bool:
        """Return whether the pattern is worth at least as much as another one, and not by chance."""
        return self.total.value >= other.value and self._is_clear(self.total, self._everywhere)

    def explained(self, late: Array) -> float:
        """Return the share of the reward's variance that the pattern explains: over the run or late, if more."""
        late_worth = self._slope(late)
        shares = [0.0]
        if self._is_clear(self.total, self._everywhere):
            shares.append(self._share(self.total.value, self._everywhere))
        if self._is_clear(late_worth, late):
            shares.append(self._share(self._lasting(late_worth, self._slope(~late)), late))
        return min(1.0, max(shares))

    def _lasting(self, late: Estimate, before: Estimate) -> float:
        """Return what a pattern is worth late, or before, if it was clearly worth less then.

        What the reward favours is worth as much early as late. A word of what the reward asks for is worth more late,
        when other differences have gone.
        """
        grew = late.value - before.value > LATER * np.hypot(late.error, before.error)
        return max(0.0, before.value) if grew else late.value

    def _share(self, worth: float, part: Array) -> float:
        """Return how much variance a worth makes in a part, as a share of the reward's variance over the run."""
        has, _, _ = self._beyond_length(part)
        return worth**2 * float(np.var(has)) / max(float(np.var(self._reward[self._known])), 1e-9)

    def _slope(self, part: Array) -> Estimate:
        """Return the slope of the reward on the pattern; responses to the same prompt are one observation."""
        has, reward, prompt = self._beyond_length(part)
        size = max(float(has @ has), 1e-9)
        slope = float(has @ reward) / size
        of_prompts = np.bincount(prompt, has * (reward - slope * has))
        return Estimate(slope, float(np.sqrt(np.sum(of_prompts**2))) / size)

    def _is_clear(self, worth: Estimate, part: Array) -> bool:
        """Return whether a worth is above 0, and not by chance: Student's t as a normal deviate.

        Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.8.
        """
        has, _, prompt = self._beyond_length(part)
        of_prompts = np.bincount(prompt, has**2)
        # Prompts count by what they contribute: if a single one lacks the pattern, they say no more than one would.
        free = max(float(of_prompts.sum() ** 2 / max(np.sum(of_prompts**2), 1e-12)) - 1, 1e-9)
        t = worth.value / max(worth.error, 1e-12)
        return bool(t * (1 - 1 / (4 * free)) / np.sqrt(1 + t**2 / (2 * free)) > self._clear)

    def _beyond_length(self, part: Array) -> tuple[Array, Array, Array]:
        """Return pattern and reward in a part, minus their means among responses of similar length, and the prompts."""
        inside = part & self._known
        length = self._length[inside]
        alike = np.unique(np.searchsorted(np.quantile(length, EIGHTHS), length), return_inverse=True)[1]
        has, reward = (values[inside] - mean_of(alike, values[inside]) for values in (self._has, self._reward))
        return has, reward, self._prompt[inside]


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
              "repetition-loops", "kl-explosion", "reward-exhausted", "one-part-dominates", "length-exploited",
              *CRITIC],
)  # fmt: skip
def pattern_spreading(data: RunData, *, limit: float = Share(0.12)) -> Reading | None:
    rows = data.sample.rows
    rows = rows.where(np.array([bool(text) for text in rows.texts("response")], bool))  # empty ones lack every pattern
    if len(rows) < 2 * MIN_ROLLOUTS:
        return None
    most = 0.0
    # A desired property has many words, each of which explains only some hundredths of the variance.
    parts = _late(rows)
    for late in parts:
        found = [pattern for pattern in spreading(rows, late, data.chance / len(parts)) if pattern.lift > 0]
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
