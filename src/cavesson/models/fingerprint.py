"""Hashes that tell models and tokenizers apart."""

import hashlib

from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the names, shapes and first thousand values of all weights, enough to distinguish models."""
    return digest(
        [(n, tuple(p.shape), p.detach().flatten()[:1000].float().tolist()) for n, p in model.named_parameters()]
    )


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
