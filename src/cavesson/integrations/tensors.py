"""Convert the tensors of a trainer to arrays and lists."""

from typing import Any

import numpy as np

from cavesson.record.precision import Array


def as_array(tensor: Any) -> Array:
    """Return a tensor as an array on the CPU, with floats in float64."""
    values = tensor.detach().cpu()
    return np.asarray((values.double() if values.dtype.is_floating_point else values).numpy())


def without_padding(ids: Any, mask: Any) -> list[list[int]]:
    """Return the rows of the tensor or array ``ids`` [B, S] without the entries where ``mask`` is 0."""
    return [row[kept].tolist() for row, kept in zip(np.asarray(ids), np.asarray(mask, np.bool_), strict=True)]
