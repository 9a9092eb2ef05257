"""The check for NaN and infinite values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cavesson.errors import NonFiniteError


def check_finite(step: int, tensors: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
    """Raise an error if a tensor has a NaN or infinite value where `mask` is set.

    Without a mask, or if a tensor has a different shape, all its values are checked.

    Raises:
        NonFiniteError: there is such a value; the message names the first tensor with one.
    """
    for name, tensor in tensors.items():
        seen = tensor if mask is None or tensor.shape != mask.shape else tensor[mask > 0]
        if not bool(torch.isfinite(seen).all()):
            kind = "NaN" if bool(torch.isnan(seen).any()) else "infinite"
            raise NonFiniteError(
                f"step {step}: {name} is {kind}; the run stopped before using it, and the record up to here is complete"
            )
