"""The Mann–Kendall test for a rise or fall. SciPy has it, but takes longer to import than a small run to diagnose."""

import math
from typing import Any

import numpy as np


def mann_kendall(values: np.ndarray[Any, np.dtype[Any]]) -> float:
    """Return the probability of an order as strong as this one by chance, in both directions.

    It is exact without equal values. With them, the statistic is taken as normal, with their variance.

    Args:
        values: [n] in the order of time.

    Sources: Mann (1945); Kendall, Rank Correlation Methods (1975), chapters 1 and 4.
    """
    n = len(values)
    rises_minus_falls = int(np.triu(np.sign(values - values[:, None])).sum())
    _, equal = np.unique(values, return_counts=True)
    if (equal == 1).all():
        against = (n * (n - 1) // 2 - abs(rises_minus_falls)) // 2
        return min(1.0, 2 * float(_inversions(n)[: against + 1].sum()))
    variance = (n * (n - 1) * (2 * n + 5) - (equal * (equal - 1) * (2 * equal + 5)).sum()) / 18
    return math.erfc(abs(rises_minus_falls) / math.sqrt(2 * variance)) if variance else 1.0


def _inversions(n: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the probability of each number of inversions of a random permutation of ``n``."""
    chance = np.ones(1)
    for size in range(2, n + 1):  # the next element is inverted with 0 to size - 1 of those before it
        chance = np.convolve(chance, np.full(size, 1 / size))
    return chance
