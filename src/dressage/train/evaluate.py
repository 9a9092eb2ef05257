"""Rewards of a policy on held-out prompts, with a confidence interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from dressage.train.rollouts import Collector, Rows

# Far from any training step, so that held-out responses never share random numbers with rollouts.
EVALUATION_STEP = 2**32


@dataclass(frozen=True)
class Interval:
    """A mean with the bounds of its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def evaluate(collector: Collector, samples_per_prompt: int) -> Rows:
    """Sample responses to every prompt of the collector and reward them.

    The same call on a changed policy meets the same prompts in the same order with the same random numbers.
    """
    indices = [i for i in range(len(collector.prompts)) for _ in range(samples_per_prompt)]
    _, rows = collector.sample(indices, EVALUATION_STEP, range(len(indices)))
    return collector.reward(rows, subtract_query=False)


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
