"""Correlation of two variables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = Sequence[float | int] | NDArray[Any]


def rank_correlation(x: Values, y: Values) -> float | None:
    """Return Spearman's ρ, with mean ranks for ties, or None if all values of a variable are equal."""
    from scipy import stats  # takes a second to import

    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(stats.spearmanr(x, y).statistic)
