"""Losses: one number per token. The caller decides what to average over."""

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_policy(
    logprob: Float[Tensor, "B T"], old_logprob: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], clip: float
) -> Float[Tensor, "B T"]:
    """Return −min(ρ·Â, clip(ρ, 1 − ε, 1 + ε)·Â), with ρ = π/π_old (arXiv:1707.06347, eq. 7)."""
    return clipped_ratio((logprob - old_logprob).exp(), advantage, clip, clip)


def clipped_ratio(
    ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], low: float, high: float
) -> Float[Tensor, "B T"]:
    """Return −min(ρ·Â, clip(ρ, 1 − ε_low, 1 + ε_high)·Â) for any ratio ρ (clip-higher: arXiv:2503.14476, eq. 10)."""
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def clipped_value(
    value: Float[Tensor, "B T"], old_value: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], clip: float
) -> Float[Tensor, "B T"]:
    """Return ½·max((V − R)², (clip(V, V_old ± ε) − R)²): OpenAI baselines' clipped value loss, also used by TRL."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)
