"""The guard against numbers that are none."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cavesson.errors import NonFiniteError


def check_finite(step: int, tensors: Mapping[str, Tensor], mask: Tensor | None = None) -> None:
    """Raise NonFiniteError naming the first tensor with a NaN or an infinity where `mask` (all, if None) is set."""
    for name, tensor in tensors.items():
        seen = tensor if mask is None or tensor.shape != mask.shape else tensor[mask > 0]
        if not bool(torch.isfinite(seen).all()):
            kind = "NaN" if bool(torch.isnan(seen).any()) else "infinite"
            raise NonFiniteError(
                f"step {step}: {name} is {kind}; the run stopped before using it, and the record up to here is complete"
            )
