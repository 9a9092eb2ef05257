"""Credit assignment: pure functions of rewards, values and masks."""

import torch
from jaxtyping import Float
from torch import Tensor


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    mask: Float[Tensor, "B T"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "B T"]:
    """Â_t = δ_t + γλ·Â_{t+1}, with δ_t = r_t + γ·V_{t+1} − V_t (arXiv:1506.02438, eq. 16).

    The state after the last token is terminal (V = 0), whether the response ended by itself or at the length limit.
    Padding on the right is zero in the result whatever it holds.
    """
    inside = mask > 0
    rewards, values = (x.masked_fill(~inside, 0.0) for x in (rewards, values))
    advantage = next_value = torch.zeros_like(values[:, 0])
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = (delta + gamma * lam * advantage) * inside[:, t]
        next_value = values[:, t]
        reversed_advantages.append(advantage)
    return torch.stack(reversed_advantages[::-1], dim=1)
