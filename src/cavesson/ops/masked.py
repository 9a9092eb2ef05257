"""Weighted reductions, used wherever an average over tokens is computed."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

Mean = Callable[[Tensor, Tensor], Tensor]
"""Returns a weighted mean of values and weights: `weighted_mean`, or one over more rows than these."""


def weighted_mean(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"], total: float | None = None) -> Float[Tensor, ""]:
    """Return Σ w·x / total; `total` defaults to Σ w of this batch, and the mean of a batch with zero weight is 0."""
    # Padding may hold anything, including NaN, and 0 · NaN is NaN. So it is replaced instead of multiplied by 0.
    weighted = (weight * x).masked_fill(weight == 0, 0.0).sum()
    return weighted / (weight.sum().clamp_min(1e-8) if total is None else total)


def spread(x: Float[Tensor, " N"], places: Int[Tensor, " N"], like: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """Return numbers at their places in a tensor of another's shape, counted along its last axis first, 0 elsewhere."""
    return torch.zeros_like(like).flatten().index_copy(0, places, x).view_as(like)


def weighted_var(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"], mean: Mean = weighted_mean) -> Float[Tensor, ""]:
    """Return Σ w·(x − mean)² / Σ w: the biased variance, which is defined even for a single token."""
    return mean((x - mean(x, weight)) ** 2, weight)


def whiten(
    x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], shift_mean: bool = True, mean: Mean = weighted_mean
) -> Float[Tensor, "B T"]:
    """Scale to unit variance over the masked tokens, and shift to zero mean unless `shift_mean` is false.

    The result is 0 on padding. Like `masked_whiten` in the code of arXiv:1909.08593 and in TRL: rewards are scaled with
    `shift_mean=False`, which keeps their mean. The variance is the biased one, so that a single token does not give
    NaN; with `shift_mean`, it gives 0. `mean` may cover more rows than these, such as those of other processes.
    """
    centre = mean(x, mask)
    scaled = (x - centre) * (weighted_var(x, mask, mean) + 1e-8).rsqrt()
    return ((scaled if shift_mean else scaled + centre) * mask).masked_fill(mask == 0, 0.0)
