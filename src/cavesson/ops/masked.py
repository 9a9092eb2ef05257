"""Weighted reductions. Everything that averages over tokens goes through here."""

from jaxtyping import Float
from torch import Tensor


def weighted_mean(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"], total: float | None = None) -> Float[Tensor, ""]:
    """Σ w·x / total; `total` defaults to Σ w of this very batch, and a batch without weight has mean 0."""
    # Padding may hold anything, NaN included, and 0 · NaN is NaN: it is replaced, not multiplied away.
    weighted = (weight * x).masked_fill(weight == 0, 0.0).sum()
    return weighted / (weight.sum().clamp_min(1e-8) if total is None else total)


def weighted_var(x: Float[Tensor, "*s"], weight: Float[Tensor, "*s"]) -> Float[Tensor, ""]:
    """Σ w·(x − mean)² / Σ w: the biased variance, defined for a single token as well."""
    return weighted_mean((x - weighted_mean(x, weight)) ** 2, weight)


def whiten(x: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], shift_mean: bool = True) -> Float[Tensor, "B T"]:
    """Unit variance over the masked tokens, zero mean unless `shift_mean` is off; zero on padding.

    As `masked_whiten` in arXiv:1909.08593's code and TRL: rewards are scaled with `shift_mean=False`, which keeps
    their mean. The variance is the biased one, so one token gives 0 instead of NaN.
    """
    mean = weighted_mean(x, mask)
    scaled = (x - mean) * (weighted_var(x, mask) + 1e-8).rsqrt()
    return ((scaled if shift_mean else scaled + mean) * mask).masked_fill(mask == 0, 0.0)
