"""Lists of different lengths as the recorder's arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def padded(columns: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Array]:
    """Returns [B, T] arrays, padded on the right, and their ``mask``.

    Args:
        columns: Name → B lists; the lists of one rollout are of the same length in every column.
    """
    lengths = np.array([len(row) for row in next(iter(columns.values()))], np.int64)
    mask: Array = np.arange(lengths.max(initial=0)) < lengths[:, None]
    arrays: dict[str, Array] = {"mask": mask}
    for name, rows in columns.items():
        array = np.zeros(mask.shape, np.int64 if name == "token_id" else np.float64)
        array[mask] = np.concatenate([np.asarray(row, array.dtype) for row in rows]) if mask.any() else []
        arrays[name] = array
    return arrays


def left_padded(ids: Array, mask: Array) -> list[list[int]]:
    """Returns the rows of ``ids`` [B, S] without what ``mask`` leaves out."""
    return [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
