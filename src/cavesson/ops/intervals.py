"""Confidence intervals of statistics measured on a sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, stdev, variance
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Interval:
    """A mean, or another statistic, with the bounds of its 95 % confidence interval.

    The bounds are None if the sample does not show how certain the mean is.
    """

    mean: float
    low: float | None
    high: float | None

    @property
    def sign(self) -> int:
        """1 if the interval is above 0, -1 if it is below 0; 0 if it contains 0 or is not known."""
        if self.low is None or self.high is None:
            return 0
        return (self.low > 0) - (self.high < 0)


def mean_interval(values: Sequence[float | int], groups: Sequence[int]) -> Interval:
    """Return the mean of `values` with Student's interval, computed from the means of their groups.

    Responses to the same prompt are correlated, so the prompts, not the responses, count as independent samples. A
    single prompt, or prompts whose means are all equal, do not show how much others would differ.
    """
    return _around_means(fmean(values), [fmean(group) for group in _members(values, groups)])


def mean_interval_of_sums(sums: Array, counts: Array) -> Interval:
    """Return what `mean_interval` does, given the values of each group by their sum and their number.

    Args:
        sums: [G] floats.
        counts: [G] how many values each sum has, at least one.
    """
    return _around_means(float(sums.sum() / counts.sum()), (sums / counts).tolist())


def _around_means(mean: float, of_groups: Sequence[float]) -> Interval:
    error = stdev(of_groups) / len(of_groups) ** 0.5 if len(of_groups) > 1 else 0.0
    return around(mean, half_width(error, len(of_groups) - 1) if error else None)


def around(mean: float, half: float | None) -> Interval:
    """Return an interval with its mean in the middle, and half of its width; None if that is not known."""
    return Interval(mean, None, None) if half is None else Interval(mean, mean - half, mean + half)


def change(values: Sequence[float]) -> Interval:
    """Return how much the last third of a series is above the first third, with Welch's interval (1947).

    A series that rises within a third varies more there, which makes the interval wider. There is none for fewer than
    nine values, or if they do not vary.
    """
    third = len(values) // 3
    first, last = values[:third], values[len(values) - third :]
    if third < 3:
        return around(values[-1] - values[0], None)
    errors = [variance(part) / third for part in (first, last)]
    difference, both = fmean(last) - fmean(first), sum(errors)
    if both == 0:
        return around(difference, None)
    free = both**2 / (sum(error**2 for error in errors) / (third - 1))
    return around(difference, half_width(both**0.5, free))


def difference_interval(values: Array, chosen: Array, groups: Array) -> Interval:
    """Return how much the mean of the chosen values is above the mean of the others, with Student's interval.

    Values of a group, such as responses to the same prompt, are correlated, on one side and across both. The error is
    therefore that of the sums over groups (Liang and Zeger 1986): with e = (x − mean)/n on the chosen side and
    −(x − mean)/n on the other, it is the root of G/(G − 1) · Σ (Σ e of a group)², where G is the number of groups.
    The degrees of freedom are one less than the groups of the side that has fewer. There is no interval if a side has
    fewer than two groups, or if nothing varies.

    Args:
        values: [N] floats.
        chosen: [N] booleans, of which some are true and some false.
        groups: [N] which group each value belongs to: integers from 0.
    """
    sides = (chosen, ~chosen)
    means = [float(values[side].mean()) for side in sides]
    error = np.where(chosen, (values - means[0]) / chosen.sum(), (means[1] - values) / (~chosen).sum())
    counts = [int(np.count_nonzero(np.bincount(groups[side]))) for side in sides]
    difference = means[0] - means[1]
    if min(counts) < 2:
        return around(difference, None)
    sums, many = np.bincount(groups, error), int(np.count_nonzero(np.bincount(groups)))
    spread = float(np.sum(sums**2)) * many / (many - 1)
    return around(difference, half_width(spread**0.5, min(counts) - 1) if spread > 0 else None)


def _members(values: Sequence[float | int], groups: Sequence[int]) -> list[list[float]]:
    members: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(float(value))
    return list(members.values())


def half_width(error: float, free: float | int) -> float:
    """Return half the width of the 95 % interval of an estimate with a standard error and its degrees of freedom."""
    from scipy import special  # slow to import

    return error * float(special.stdtrit(free, 0.975))


def share_interval(values: Sequence[float | int], groups: Sequence[int]) -> Interval:
    """Return the mean of values between 0 and 1 with an interval that stays within 0 and 1.

    It is the interval of Clopper and Pearson (1934) for as many independent trials as tell as much as the values do
    (Korn and Graubard 1998): responses to the same prompt resemble each other. They are worth p·(1 − p)/v trials, where
    v is the variance of the mean p, estimated from the prompts; but no fewer than there are prompts, which is what they
    are worth if all responses to a prompt are alike, and no more than if they were independent.

    Where few prompts differ from the mean, v is uncertain. Its degrees of freedom are therefore the effective number of
    the squared deviations of the prompts, (Σd)²/Σd² (Kish 1965), at most one less than there are prompts.

    Args:
        values: successes (1) and failures (0), or shares of a success, such as 1/2 for a draw.
        groups: which prompt each value belongs to.
    """
    mean, members = fmean(values), _members(values, groups)
    deviations = [sum(value - mean for value in group) for group in members]
    alone = sum((value - mean) ** 2 for value in values)
    return _share(mean, [len(group) for group in members], deviations, alone)


def share_interval_of_counts(successes: Sequence[int], trials: Sequence[int]) -> Interval:
    """Return what `share_interval` does, given the successes of each group among its trials, of which it has one."""
    total = sum(trials)
    mean = sum(successes) / total
    deviations = [wins - mean * size for wins, size in zip(successes, trials, strict=True)]
    return _share(mean, trials, deviations, sum(successes) * (total - sum(successes)) / total)


def _share(mean: float, sizes: Sequence[int], deviations: Sequence[float], alone: float) -> Interval:
    """Return the interval of a share, given each group's size and summed deviation, and all squared deviations."""
    trials = _trials(mean, sizes, deviations, alone)
    return replace(proportion_interval(trials * mean, trials), mean=mean)


def proportion_interval(wins: float | int, trials: float | int) -> Interval:
    """Return the share of successes in independent trials with the interval of Clopper and Pearson (1934)."""
    from scipy import special  # slow to import

    losses = trials - wins
    low = float(special.betaincinv(wins, losses + 1, 0.025)) if wins else 0.0
    high = float(special.betaincinv(wins + 1, losses, 0.975)) if losses else 1.0
    return Interval(wins / trials, low, high)


def _trials(mean: float, sizes: Sequence[int], deviations: Sequence[float], alone: float) -> float:
    """Return the number of independent trials that tell as much about the mean as grouped values do."""
    count, groups = sum(sizes), len(sizes)
    fewest = count**2 / sum(size**2 for size in sizes)
    if alone == 0 or groups == 1:
        return fewest
    squares = [one**2 for one in deviations]
    total = sum(squares)
    between = total / count**2 * groups / (groups - 1)
    free = float(groups - 1)
    if total > 0:
        free = min(free, total**2 / sum(one**2 for one in squares))
    less = half_width(1.0, count - 1) / half_width(1.0, free)
    return max(fewest, mean * (1 - mean) / max(between, alone / count**2) * less**2)


def twin_correlation(first: Sequence[float | int], second: Sequence[float | int]) -> Interval | None:
    """Return the intraclass correlation of pairs, estimated by analysis of variance.

    If positive, it is the share of the variance that lies between the pairs. If negative, the members of a pair differ
    more than members of different pairs do. The interval is Fisher's (Statistical Methods for Research Workers,
    chapter 7): half the logarithm of the ratio of the two mean squares has the standard deviation 1/√(n − 3/2).

    Returns:
        The correlation with its interval, or None if there are fewer than two pairs or all values are equal.
    """
    if len(first) < 2:
        return None
    pairs = list(zip(first, second, strict=True))
    between = 2 * variance([fmean(pair) for pair in pairs])
    within = fmean((a - b) ** 2 / 2 for a, b in pairs)
    if between + within == 0:
        return None
    correlation = (between - within) / (between + within)
    if abs(correlation) == 1:
        return Interval(correlation, correlation, correlation)
    half = NormalDist().inv_cdf(0.975) / (len(pairs) - 1.5) ** 0.5
    low, high = (math.tanh(math.atanh(correlation) + side) for side in (-half, half))
    return Interval(correlation, low, high)
