"""Hashes that tell models and tokenizers apart."""

import hashlib

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the names, shapes and first thousand values of all weights, enough to distinguish models.

    All processes must call this together, if they share the weights.
    """
    return digest([(name, tuple(p.shape), _first(p)) for name, p in model.named_parameters()])


def _first(weight: Tensor) -> list[float]:
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    values: list[float] = whole.detach().flatten()[:1000].float().tolist()
    return values


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
