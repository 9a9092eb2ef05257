"""Confidence intervals of what was measured on a sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance


@dataclass(frozen=True)
class Interval:
    """A mean, or another figure, with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float | int], groups: Sequence[int]) -> Interval:
    """Mean of `values` with a normal interval over the means of their groups.

    Responses to one prompt resemble each other, so the prompts, not the responses, are counted as independent.
    """
    members: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(value)
    means = [fmean(group) for group in members.values()]
    half = NormalDist().inv_cdf(0.975) * stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def share_interval(successes: float | int, trials: int) -> Interval:
    """A share with Wilson's score interval (Wilson 1927), which stays within 0 and 1.

    A trial may succeed by half; such trials vary less than the interval supposes, so that it is rather too wide.
    """
    z = NormalDist().inv_cdf(0.975)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


def twin_correlation(first: Sequence[float | int], second: Sequence[float | int]) -> Interval | None:
    """How alike the two members of a pair are: the intraclass correlation, in its estimate by analysis of variance.

    Above 0 it is the share of the variance that lies between the pairs; below 0 the members of a pair differ more than
    members of different pairs do. The interval is Fisher's (Statistical Methods for Research Workers, chapter 7): half
    the logarithm of the ratio of the two mean squares has the standard deviation 1/√(n − 3/2).

    Returns:
        None for fewer than two pairs, or where nothing varies.
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
