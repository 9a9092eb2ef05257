"""What a property of some responses, such as a word, is worth: how much more reward they get."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from cavesson.doctor.groups import beside, mean_of
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.doctor.windows import lengths

RECUR = 4
"""Responses to a prompt from which their mean is known."""
ALIKE = 24
"""Responses that are compared with each other because they are alike in length, at least."""
ROUNDS = 8
"""Times that the means of each kind are subtracted."""
LATER = 3.0
"""Standard errors by which a pattern must be worth more late than before."""


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


def clear_of(chance: float, patterns: int) -> float:
    """Return the standard errors that none of so many patterns exceeds by chance."""
    return NormalDist().inv_cdf(1 - chance / max(patterns, 1))


def share_of(has: Array, prompt: Array) -> Estimate:
    """Return the share of responses that have a pattern; responses to the same prompt are one observation."""
    share = float(has.mean())
    error = float(np.sqrt(np.sum(np.bincount(prompt, has - share) ** 2))) / len(has)
    smooth = (has.sum() + 0.5) / (len(has) + 1)  # a share of 0 or 1 is not certain either
    return Estimate(share, max(error, float(np.sqrt(smooth * (1 - smooth) / len(has)))))


def grows(before: Estimate, now: Estimate, clear: float) -> bool:
    """Return whether a share is larger now, by so many standard errors."""
    return bool(now.value - before.value > clear * np.hypot(now.error, before.error))


def prompts_of(rows: Rows) -> Array:
    """Return [n] the number of each rollout's prompt; each its own if prompts are not known."""
    key = rows["group"]
    alone = np.nanmax(key, initial=0.0) + 1 + np.arange(len(rows))
    return np.unique(np.where(np.isfinite(key), key, alone), return_inverse=True)[1]


def comparable(rows: Rows, prompt: Array) -> list[Array]:
    """Return the keys [n] of responses that are compared: their group or step and, where prompts recur, their prompt.

    A prompt may earn more than others for reasons of its own, whatever its responses contain.
    """
    recur = np.median(np.bincount(prompt)[prompt]) >= RECUR
    return [beside(rows, rows["reward"]), *([prompt] if recur else [])]


def without_means(values: Array, keys: Sequence[Array]) -> Array:
    """Return values [n] minus their means among equals of several kinds, by alternating projections.

    Source: von Neumann's alternating projections, as in Guimarães and Portugal (2010) for fixed effects.
    """
    for _ in range(ROUNDS if len(keys) > 1 else 1):
        for key in keys:
            values = np.asarray(values - mean_of(key, values))
    return values


class Worth:
    """What a pattern is worth, beyond what the length of a response is worth.

    A longer response has more of everything: of `. the`, and of what the reward asks for.

    Args:
        has: [n] whether responses have the pattern.
        reward: [n] NaN where it is not known.
        keys: Which responses are compared, as from ``comparable``.
        length: [n] in words.
        prompt: [n] the number of each response's prompt.
        clear: Standard errors that a worth must exceed.
    """

    def __init__(
        self, has: Array, reward: Array, keys: Sequence[Array], length: Array, prompt: Array, clear: float
    ) -> None:
        self._known = np.isfinite(reward)
        self._has, self._reward, self._keys = has.astype(float), reward, keys
        self._length, self._prompt, self._clear = length, prompt, clear
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
        has, _ = self._compared(part)
        _, reward = self._compared(self._everywhere)
        return worth**2 * float(np.var(has)) / max(float(np.var(reward)), 1e-9)

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

    def _compared(self, part: Array, *more: Array) -> tuple[Array, Array]:
        """Return pattern and reward in a part, minus their means among comparable responses."""
        inside = part & self._known
        keys = [*(np.unique(key[inside], return_inverse=True)[1] for key in self._keys), *more]
        return without_means(self._has[inside], keys), without_means(self._reward[inside], keys)

    def _beyond_length(self, part: Array) -> tuple[Array, Array, Array]:
        """Return pattern and reward in a part, minus their means among responses of similar length, and the prompts."""
        inside = part & self._known
        length = self._length[inside]
        bounds = np.quantile(length, np.linspace(0, 1, max(len(length) // ALIKE, 1) + 1)[1:-1])
        alike = np.unique(np.searchsorted(bounds, length), return_inverse=True)[1]
        return *self._compared(part, alike), self._prompt[inside]


def late_parts(rows: Rows) -> list[Array]:
    """Return [n] which rollouts are of the last fifth of the steps, and of windows that are shorter than that."""
    fifth = float(np.quantile(rows.steps, 0.8))
    last = int(rows.steps[-1])
    begins = [fifth, *(last - length + 1 for length in lengths(last - fifth))]
    return [np.asarray(rows.step >= begin) for begin in begins]
