"""Sets as sorted arrays: sorting is fast for any numbers; ``numpy.unique`` and ``isin`` may hash, which is slower."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def are_first(values: Array) -> Array:
    """Return [N] whether each value is the first of a run of equal values."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


def distinct(values: Array) -> Array:
    """Return the distinct values, ascending."""
    ordered = np.sort(values)
    return np.asarray(ordered[are_first(ordered)])


def contains(ordered: Array, values: Array) -> Array:
    """Return for each value whether it is in ``ordered``, which must be ascending."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    place = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.asarray(ordered[place] == values)
