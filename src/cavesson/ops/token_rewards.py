"""The signal of every token: a penalty for leaving the reference, and the response's score on its last token."""

import torch
from jaxtyping import Float
from torch import Tensor

from cavesson.ops.ratios import response_sum


def token_rewards(
    score: Float[Tensor, " B"], kl: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], coef: float
) -> Float[Tensor, "B T"]:
    """r_t = −β·KL_t, plus the score at the last token of the response (arXiv:1909.08593, eq. 2).

    An empty response has no token to carry its score and stays all zero.
    """
    penalty = (-coef * kl * mask).masked_fill(mask == 0, 0.0)
    lengths = mask.sum(1).long()
    positions = torch.arange(mask.shape[1], device=mask.device)
    return penalty + score[:, None] * (positions == lengths[:, None] - 1)


def penalised(
    score: Float[Tensor, " B"], kl: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], coef: float
) -> Float[Tensor, " B"]:
    """What a whole response earns when it is one action: r − β·Σ_t KL_t (arXiv:2402.14740, section 2)."""
    return score - coef * response_sum(kl, mask)


def soft_overlong(length: Float[Tensor, " B"], limit: int, buffer: int) -> Float[Tensor, " B"]:
    """0 up to limit − buffer tokens, then falling in a straight line to −1 at the limit (arXiv:2503.14476, eq. 13)."""
    return ((limit - buffer - length) / buffer).clamp(-1.0, 0.0)
