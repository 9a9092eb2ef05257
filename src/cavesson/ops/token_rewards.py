"""Token rewards: a KL penalty on every token, the rewards of turns, and the score of the response on its last token.

A mask is 1 on the tokens that the policy sampled; there may be others before and between them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cavesson.ops.ratios import response_sum


def token_rewards(
    score: Float[Tensor, " B"],
    kl: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    coef: float,
    turns: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return r_t = −β·KL_t, plus the score at the last sampled token (arXiv:1909.08593, eq. 2); 0 on other tokens.

    An empty response has no token that could carry its score, so its rewards are all 0. Rewards of turns,
    each on a sampled token, keep their places, and the last token gets the rest of the score: the sum is the same.
    """
    if turns is not None:
        return token_rewards(score - turns.sum(1), kl, mask, coef) + turns.to(kl.dtype)
    penalty = (-coef * kl * mask).masked_fill(mask == 0, 0.0)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) * (mask > 0)
    is_last = (positions == positions.amax(1, keepdim=True)) & (mask > 0)
    return penalty + score[:, None].to(penalty.dtype) * is_last


def penalised(
    score: Float[Tensor, " B"], kl: Float[Tensor, "B T"], mask: Float[Tensor, "B T"], coef: float
) -> Float[Tensor, " B"]:
    """Return r − β·Σ_t KL_t, the reward of a whole response treated as one action (arXiv:2402.14740, section 2)."""
    return score - coef * response_sum(kl, mask)


def soft_overlong(length: Float[Tensor, " B"], limit: int, buffer: int) -> Float[Tensor, " B"]:
    """Return the soft penalty for overlong responses (arXiv:2503.14476, eq. 13).

    It is 0 up to limit − buffer tokens and then decreases linearly to −1 at the limit.
    """
    return ((limit - buffer - length) / buffer).clamp(-1.0, 0.0)
