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
    next_value: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T"]:
    """Return the generalised advantage estimates Â_t = δ_t + γλ·Â_{t+1}.

    Here δ_t = r_t + γ·V_{t+1} − V_t (arXiv:1506.02438, eq. 16). `next_value` is the value of the state after the last
    token of a response that a limit has cut (partial-episode bootstrapping, arXiv:1712.00378), and 0 for a response
    that has ended. Without it, the state is terminal (V = 0), whether the response ended by itself or at a limit.

    Tokens outside the mask, such as the result of a tool, are not actions of the policy: the tokens around them follow
    each other as if these were not there. The result is 0 on them, whatever the inputs hold there.
    """
    inside = mask > 0
    rewards, values = (x.masked_fill(~inside, 0.0) for x in (rewards, values))
    advantage = torch.zeros_like(values[:, 0])
    following = advantage if next_value is None else next_value
    reversed_advantages = []
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        advantage = torch.where(inside[:, t], delta + gamma * lam * advantage, advantage)
        following = torch.where(inside[:, t], values[:, t], following)
        reversed_advantages.append(advantage * inside[:, t])
    return torch.stack(reversed_advantages[::-1], dim=1)
