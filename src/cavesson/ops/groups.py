"""Statistics of the responses to one prompt: each function says for every response what its group says of it.

`group` holds any integers; rows with the same one belong together, wherever they stand and however many they are. With
the same integer everywhere the batch is the group. Where all rewards of a group are equal, what is left of them is
exactly 0, not rounding.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def group_means(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The mean reward of each response's group."""
    rows = _rows(group)
    lowest = _extreme(rewards, rows, "amin")
    # Averaged from the group's lowest on, so that the mean of equal numbers is that very number.
    return lowest + _sums(rewards - lowest, rows) / _sizes(rows)


def centred(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """r_i − mean(r_1 … r_G)."""
    return rewards - group_means(rewards, group)


def leave_one_out(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """r_i − 1/(G−1)·Σ_{j≠i} r_j = G/(G−1)·(r_i − mean) (arXiv:2402.14740, section 3.2).

    A group of one has nothing to be compared with and gives 0.
    """
    size = _sizes(_rows(group))
    return centred(rewards, group) * size / (size - 1).clamp_min(1.0)


def group_stds(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """The unbiased standard deviation (divided by G − 1) of each response's group, as TRL and verl use it.

    A group of one gives 0.
    """
    rows = _rows(group)
    return (_sums(centred(rewards, group) ** 2, rows) / (_sizes(rows) - 1).clamp_min(1.0)).sqrt()


def varied(rewards: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Bool[Tensor, " B"]:
    """Whether the rewards of each response's group differ; equal ones teach nothing (arXiv:2503.14476, eq. 11)."""
    rows = _rows(group)
    return _extreme(rewards, rows, "amax") > _extreme(rewards, rows, "amin")


def _rows(group: Tensor) -> Tensor:
    """Groups numbered from 0."""
    numbered: Tensor = group.unique(return_inverse=True)[1]
    return numbered


def _sums(x: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, rows, x)[rows]


def _sizes(rows: Tensor) -> Tensor:
    return torch.bincount(rows)[rows].float()


def _extreme(x: Tensor, rows: Tensor, which: str) -> Tensor:
    return torch.zeros_like(x).scatter_reduce(0, rows, x, which, include_self=False)[rows]
