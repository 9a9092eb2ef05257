"""Confidence intervals of what was measured on a sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], groups: Sequence[int]) -> Interval:
    """Mean of `values` with a normal interval over the means of their groups.

    Responses to one prompt resemble each other, so the prompts, not the responses, are counted as independent.
    """
    members: dict[int, list[float]] = {}
    for value, group in zip(values, groups, strict=True):
        members.setdefault(group, []).append(value)
    means = [fmean(group) for group in members.values()]
    half = NormalDist().inv_cdf(0.975) * stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("nan")
    return Interval(fmean(values), fmean(values) - half, fmean(values) + half)


def share_interval(successes: int, trials: int) -> Interval:
    """A share with Wilson's score interval (Wilson 1927), which stays within 0 and 1."""
    z = NormalDist().inv_cdf(0.975)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
