"""Pad lists of different lengths into arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cavesson.record.precision import Array

_TYPES = {"token_id": np.int64, "token": np.object_, "source": np.object_, "learned": np.bool_}


def padded(columns: Mapping[str, Sequence[Sequence[Any]]], count: int) -> dict[str, Array]:
    """Return [B, T] arrays of B lists per column, padded on the right, and ``attended``, which is false for this
    padding.

    The lists of one rollout have the same length in every column; ``count`` is B.

    Raises:
        ValueError: The columns differ in the number of lists or in the lengths of the lists.
    """
    lengths = [len(row) for row in next(iter(columns.values()), [()] * count)]
    for name, rows in columns.items():
        if (own := [len(row) for row in rows]) != lengths or len(own) != count:
            raise ValueError(f"tokens column {name!r} has lists of {own} tokens, expected {count}: {lengths}")
    attended: Array = np.arange(max(lengths, default=0)) < np.array(lengths, np.int64)[:, None]
    arrays: dict[str, Array] = {"attended": attended}
    for name, rows in columns.items():
        array: Array = np.zeros(attended.shape, _TYPES.get(name, np.float64))
        array[attended] = np.array([value for row in rows for value in row], array.dtype)
        arrays[name] = array
    return arrays
