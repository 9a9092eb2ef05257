"""Statistics of the responses to one prompt: each function returns, for every response, a statistic of its group.

`group` holds arbitrary integers. Rows with the same integer form a group, in any order and of any size; if all integers
are equal, the batch is one group. If all rewards of a group are equal, the centred rewards and the standard deviation
are exactly 0, without rounding error.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def group_means(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the mean reward of each response's group."""
    rows = _rows(group)
    lowest = _extreme(rewards, rows, "amin")
    # Averaging the differences from the group's minimum makes the mean of equal numbers exactly that number.
    return lowest + _sums(rewards - lowest, rows) / _sizes(rows)


def centred(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return r_i − mean(r_1 … r_G), the reward of each response minus its group mean."""
    return rewards - group_means(rewards, group)


def over_mean(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return (r_i − mean) / mean of rewards of 0 or more: each reward above its group mean, in units of that mean.

    This is the advantage A_i of MaxRL (arXiv:2602.02710). For rewards of 0 and 1 and the gradient s_i of a response's
    log-likelihood, the mean of A_i·s_i over a group of G has the expectation Σ_{k=1}^{G−1} (1/k)·∇pass@k, with pass@k
    = 1 − (1 − p)^k for the success probability p. This is the series of ∇ log p up to the order G − 1. For all rewards
    of 0 or more, A_i is between −1 and G − 1. A group whose rewards are all 0 gives 0.
    """
    mean = group_means(rewards, group)
    return (rewards - mean) / mean.where(mean > 0, 1.0)


def leave_one_out(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return each reward minus the mean reward of the other responses in its group.

    r_i − 1/(G−1)·Σ_{j≠i} r_j = G/(G−1)·(r_i − mean) (arXiv:2402.14740, section 3.2). A group of one gives 0, because
    there is nothing to compare it with.
    """
    size = _sizes(_rows(group))
    return centred(rewards, group) * size / (size - 1).clamp_min(1.0)


def group_stds(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the standard deviation of each response's group, from the unbiased variance (divided by G − 1).

    TRL and verl use the same definition. A group of one gives 0.
    """
    rows = _rows(group)
    return (_sums(centred(rewards, group) ** 2, rows) / (_sizes(rows) - 1).clamp_min(1.0)).sqrt()


def standardised(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return (r_i − mean) / (std + 1e-4) within each response's group (GDPO, arXiv:2601.05242; TRL for 1e-4).

    A reward that is NaN is not there: it changes no statistic, and its result is 0.
    """
    given = ~rewards.isnan()
    rewards, group = rewards[given], group[given]
    return torch.zeros_like(given, dtype=rewards.dtype).masked_scatter(
        given, centred(rewards, group) / (group_stds(rewards, group) + 1e-4)
    )


def varied(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Return whether the rewards in each response's group differ.

    Groups with equal rewards provide no learning signal (arXiv:2503.14476, eq. 11).
    """
    rows = _rows(group)
    return _extreme(rewards, rows, "amax") > _extreme(rewards, rows, "amin")


def _rows(group: Tensor) -> Tensor:
    """Return the group of each row, renumbered from 0."""
    numbered: Tensor = group.unique(return_inverse=True)[1]
    return numbered


def _sums(x: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, rows, x)[rows]


def _sizes(rows: Tensor) -> Tensor:
    return torch.bincount(rows)[rows].float()


def _extreme(x: Tensor, rows: Tensor, which: str) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(0, rows, x, which, include_self=False)[rows]
