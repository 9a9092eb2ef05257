"""Weighted reductions, used wherever an average over tokens is computed."""

from jaxtyping import Float
from torch import Tensor


def weighted_mean(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"], total: float | None = None) -> Float[Tensor, ""]:
    """Return Σ w·x / total; `total` defaults to Σ w of this batch, and the mean of a batch with zero weight is 0."""
    # Padding may hold anything, including NaN, and 0 · NaN is NaN. So it is replaced instead of multiplied by 0.
    weighted = (weight * x).masked_fill(weight == 0, 0.0).sum()
    return weighted / (weight.sum().clamp_min(1e-8) if total is None else total)


def weighted_var(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"]) -> Float[Tensor, ""]:
    """Return Σ w·(x − mean)² / Σ w: the biased variance, which is defined even for a single token."""
    return weighted_mean((x - weighted_mean(x, weight)) ** 2, weight)


def whiten(x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], shift_mean: bool = True) -> Float[Tensor, "B T"]:
    """Scale to unit variance over the masked tokens, and shift to zero mean unless `shift_mean` is false.

    The result is 0 on padding. Like `masked_whiten` in the code of arXiv:1909.08593 and in TRL: rewards are scaled with
    `shift_mean=False`, which keeps their mean. The variance is the biased one, so that a single token does not give
    NaN; with `shift_mean`, it gives 0.
    """
    mean = weighted_mean(x, mask)
    scaled = (x - mean) * (weighted_var(x, mask) + 1e-8).rsqrt()
    return ((scaled if shift_mean else scaled + mean) * mask).masked_fill(mask == 0, 0.0)
