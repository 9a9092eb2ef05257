"""Confidence intervals of statistics measured on a sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance


@dataclass(frozen=True)
class Interval:
    """A mean, or another statistic, with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float | int], groups: Sequence[int]) -> Interval:
    """Return the mean of `values` with Student's interval, computed from the means of their groups.

    Responses to the same prompt are correlated, so the prompts, not the responses, count as independent samples.
    """
    members: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(value)
    means = [fmean(group) for group in members.values()]
    half = half_width(stdev(means) / len(means) ** 0.5, len(means) - 1) if len(means) > 1 else float("nan")
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def half_width(error: float, free: float | int) -> float:
    """Return half the width of the 95 % interval of an estimate.

    Args:
        error: standard error of the estimate.
        free: degrees of freedom of the error.
    """
    from scipy import special  # slow to import

    return error * float(special.stdtrit(free, 0.975))


def share_interval(successes: float | int, trials: int) -> Interval:
    """Return a share with its Wilson score interval (Wilson 1927), which stays within 0 and 1.

    A trial may count as half a success. Such trials vary less than the interval assumes, so the interval is somewhat
    too wide.
    """
    z = NormalDist().inv_cdf(0.975)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))


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
