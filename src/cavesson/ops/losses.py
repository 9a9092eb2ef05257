"""Losses: one number per token. The caller decides what to average over."""

import torch
from jaxtyping import Float
from torch import Tensor


def clipped_ratio(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    low: float,
    high: float,
    dual: float | None = None,
) -> Float[Tensor, "B T"]:
    """Return −min(ρ·Â, clip(ρ, 1 − ε_low, 1 + ε_high)·Â) for any ratio ρ (clip-higher: arXiv:2503.14476, eq. 10).

    With ε_low = ε_high, it is PPO's loss (arXiv:1707.06347, eq. 7). Where Â < 0, that loss has no bound; with `dual`, a
    number c > 1 + ε_high, it is at most −c·Â (dual clip: arXiv:1912.09729, eq. 5).
    """
    bounded = ratio if dual is None else ratio.clamp_max(dual)
    return -torch.minimum(bounded * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def weighted_likelihood(
    logprob: Float[Tensor, "B T"], ratio: Float[Tensor, "B T"], advantage: Float[Tensor, "B T"], high: float
) -> Float[Tensor, "B T"]:
    """Return −sg[min(ρ, 1 + ε_high)]·Â·log π (CISPO: arXiv:2506.13585, eq. 4 and 5; sg stops the gradient).

    Every token keeps its gradient ∇ log π: clipping limits its weight and never drops it. The value is not a bound of
    anything and may have any size.
    """
    return -ratio.detach().clamp_max(1 + high) * advantage * logprob


def clipped_value(
    value: Float[Tensor, "B T"], old_value: Float[Tensor, "B T"], returns: Float[Tensor, "B T"], clip: float
) -> Float[Tensor, "B T"]:
    """Return ½·max((V − R)², (clip(V, V_old ± ε) − R)²): OpenAI baselines' clipped value loss, also used by TRL."""
    clipped = old_value + (value - old_value).clamp(-clip, clip)
    return 0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)
