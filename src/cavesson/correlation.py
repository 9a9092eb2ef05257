"""Correlation of two variables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float | int] | NDArray[Any]


def rank_correlation(x: Values, y: Values) -> float | None:
    """Return Spearman's ρ, with mean ranks for ties, or None if all values of a variable are equal."""
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Values) -> NDArray[np.float64]:
    _, where, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[where]
