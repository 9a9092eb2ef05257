"""The effect that a property of some responses, such as a word, has on the reward, and what it explains of it."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from cavesson.doctor.groups import beside, mean_of, without_means
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.doctor.windows import lengths
from cavesson.text.reward_effect import RewardEffect, effect_weight, reward_effect

RECUR = 4
"""Responses to a prompt from which their mean is known."""
ALIKE = 24
"""Responses that are compared with each other because they are alike in length, at least."""
SPREADING = (0.25, 0.75)
"""Shares of the responses between which a pattern is spreading."""
AS_MUCH = 0.75
"""Ratio from which the effect of a pattern over the run is about its effect while it spreads."""
LATER = 3.0
"""Standard errors by which the effect of a pattern must be larger late than before."""


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


class Slope(NamedTuple):
    """How much more reward the responses with a pattern get."""

    value: float
    error: float
    """Its standard error; the responses to a prompt are one observation."""
    deviate: float
    """The value in standard errors, less where few prompts tell: Student's t as a standard normal deviate."""


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


def early_part(rows: Rows) -> Array:
    """Return [n] which rollouts are of the first 15 % of the steps."""
    return np.asarray(rows.step <= np.quantile(rows.steps, 0.15))


def late_parts(rows: Rows) -> list[Array]:
    """Return [n] which rollouts are of the last fifth of the steps, and of windows that are shorter than that."""
    fifth = float(np.quantile(rows.steps, 0.8))
    last = int(rows.steps[-1])
    begins = [fifth, *(last - length + 1 for length in lengths(last - fifth))]
    return [np.asarray(rows.step >= begin) for begin in begins]


class Rewards:
    """The rewards of rollouts, and which of them are compared with each other.

    Those are of the same group or step and, where prompts recur, of the same prompt, because some prompts earn more
    than others whatever their responses contain.
    """

    def __init__(self, rows: Rows) -> None:
        self.reward, self.step = rows["reward"], np.searchsorted(rows.steps, rows.step)
        self.is_scored = np.isfinite(self.reward)
        # Prompts are independent, and responses to one prompt are not, unless the run has no other prompt.
        self.prompt = rows.prompt if np.any(rows.prompt) else np.arange(len(rows))
        recur = np.median(np.bincount(self.prompt)[self.prompt]) >= RECUR
        self.keys = [beside(rows, self.reward), *([self.prompt] if recur else [])]
        self._compared = without_means(self.reward, self.keys)
        self.variance = max(float(np.nanvar(self._compared)), 1e-9)
        """Among responses that are compared."""

    def variance_of(self, part: Array) -> float:
        """Return the variance among responses that are compared, of which only those in ``part`` [n] count."""
        return max(float(np.nanvar(self._compared[part])), 1e-9)

    def effect(self, has: Array) -> RewardEffect:
        """Return the effect of a pattern, [n], among responses of the same step: the number that the board shows."""
        has, step, reward = has[self.is_scored], self.step[self.is_scored], self.reward[self.is_scored]
        reward = reward - mean_of(step, reward)
        weight = effect_weight(np.bincount(step, has), np.bincount(step))
        return reward_effect(reward[has].sum(), weight, float(reward @ reward), len(reward))


class Part:
    """Some rollouts, of which also only those of similar length are compared.

    A longer response has more of everything: of `. the`, and of what the reward asks for.

    Args:
        rewards: Of all rollouts.
        length: [n] in words.
        inside: [n] which rollouts these are.
    """

    def __init__(self, rewards: Rewards, length: Array, inside: Array) -> None:
        self._inside = inside & rewards.is_scored
        self._keys = [key[self._inside] for key in rewards.keys]
        self._similar = [*self._keys, _similar(length[self._inside])]
        self._reward = without_means(rewards.reward[self._inside], self._similar)
        self._prompt = rewards.prompt[self._inside]

    def variance(self, has: Array) -> float:
        """Return the variance of having a pattern, [n], among responses that are compared."""
        return float(np.var(without_means(self._of(has), self._keys)))

    def correlation(self, one: Array, other: Array) -> float:
        """Return the correlation of having two patterns, [n] each, among responses that are compared."""
        a, b = (without_means(self._of(has), self._keys) for has in (one, other))
        return float(a @ b) / max(float(np.sqrt((a @ a) * (b @ b))), 1e-9)

    def slope(self, has: Array) -> Slope:
        """Return the slope of the reward on a pattern that some responses have, [n].

        Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.8, for Student's t as a normal deviate.
        """
        part = without_means(self._of(has), self._similar)
        size = max(float(part @ part), 1e-9)
        slope = float(part @ self._reward) / size
        error = float(np.sqrt(np.sum(np.bincount(self._prompt, part * (self._reward - slope * part)) ** 2))) / size
        # Prompts count by what they contribute: if a single one lacks the pattern, they say no more than one would.
        of_prompts = np.bincount(self._prompt, part**2)
        free = max(float(of_prompts.sum() ** 2 / max(np.sum(of_prompts**2), 1e-12)) - 1, 1e-9)
        t = slope / max(error, 1e-12)
        # The approximation is for more than one degree of freedom: with next to none, no slope is clear.
        smaller = max(0.0, 1 - 1 / (4 * free))
        return Slope(slope, error, float(t * smaller / np.sqrt(1 + t**2 / (2 * free))))

    def _of(self, has: Array) -> Array:
        return has[self._inside].astype(float)


class Effects:
    """What the effects of patterns explain: over the run, late in it, before that, and while they spread.

    Arguments as for ``Part``.
    """

    def __init__(self, rewards: Rewards, length: Array, late: Array) -> None:
        self.over_run = Part(rewards, length, np.ones(len(late), bool))
        self._late, self._before = Part(rewards, length, late), Part(rewards, length, ~late)
        self._rewards, self._length = rewards, length

    def explained(self, has: Array, clear: float) -> float:
        """Return the share of the reward's variance that a pattern explains: over the run, late, or while it spreads.

        The largest counts. A pattern that spreads fast is in no response at first, and in nearly all soon after: only
        in between does it tell responses apart.

        Args:
            has: [n] whether responses have the pattern.
            clear: Standard errors that its effect must exceed.
        """
        total, late = self.over_run.slope(has), self._late.slope(has)
        variance, shares = self._rewards.variance, [0.0, self._while_spreading(has, total, clear)]
        if total.deviate > clear:
            shares.append(total.value**2 * self.over_run.variance(has) / variance)
        if late.deviate > clear:
            shares.append(self._lasting(late, self._before.slope(has)) ** 2 * self._late.variance(has) / variance)
        return min(1.0, max(shares))

    def _while_spreading(self, has: Array, total: Slope, clear: float) -> float:
        """Return the share that a pattern explains in the steps in which some responses have it and some do not.

        It counts by the smaller of its effects there and over the run. A word of what the reward asks for spreads with
        many others: among responses of the same steps, its effect is smaller. One that separates responses once other
        differences have gone has a larger effect there, and does not count.
        """
        step, (low, high) = self._rewards.step, SPREADING
        share = np.bincount(step, has) / np.bincount(step)
        inside = np.asarray(((share >= low) & (share <= high))[step])
        if not np.any(inside & self._rewards.is_scored):
            return 0.0
        part = Part(self._rewards, self._length, inside)
        here = part.slope(has)
        if min(total.deviate, here.deviate) < clear or total.value < AS_MUCH * here.value:
            return 0.0
        return min(total.value, here.value) ** 2 * part.variance(has) / self._rewards.variance_of(inside)

    @staticmethod
    def _lasting(late: Slope, before: Slope) -> float:
        """Return the effect of a pattern late, or before, if it was clearly smaller then.

        What the reward favours has the same effect early as late. The effect of a word of what the reward asks for is
        larger late, when other differences have gone.
        """
        grew = late.value - before.value > LATER * np.hypot(late.error, before.error)
        return max(0.0, before.value) if grew else late.value


def _similar(length: Array) -> Array:
    """Return [n] the numbers of parts that contain responses of similar length, about as many each."""
    bounds = np.quantile(length, np.linspace(0, 1, max(len(length) // ALIKE, 1) + 1)[1:-1])
    return np.searchsorted(bounds, length)
