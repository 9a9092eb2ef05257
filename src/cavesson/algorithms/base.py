"""The interface between the training loops and an algorithm."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cavesson.config import Settings
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Rollouts


@dataclass(frozen=True)
class Loss:
    """A loss and its metrics, one number per item of the batch; the caller computes the averages."""

    loss: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    """averaged by the weights that the loss is weighted with"""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """the largest over the same items is taken"""
    response_means: dict[str, Tensor] = field(default_factory=dict)
    """`[B]`, averaged over the responses that have an item that counts, each of them once"""


class KLUse(NamedTuple):
    """Where the KL to the reference is applied, and its estimator."""

    place: Literal["reward", "loss"]
    estimator: str
    """k1, k2, k3, abs or full"""


class Algorithm(Settings):
    """`weights` says what is averaged over, `loss` what is minimised, and `traits` what rules and checks apply."""

    @property
    def traits(self) -> Traits:
        """What is true of the algorithm with these settings."""
        return Traits(samples=False)

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights of all items of the batch."""
        raise NotImplementedError

    def total(self, batch: Batch) -> Tensor:
        """Return the number that the weighted sum over a whole mini-batch is divided by."""
        return self.weights(batch).sum()

    def loss(self, scores: Any, batch: Batch) -> Loss:
        """Return the loss, with one number per item of `weights`; `scores` is what the model says of the batch."""
        raise NotImplementedError


class RolloutAlgorithm(Algorithm):
    """Learns from responses that the policy sampled: `credit` says what each token of them earned."""

    @property
    def traits(self) -> Traits:
        return Traits()

    @property
    def max_batches(self) -> int:
        """The maximum number of batches of prompts per step, to replace groups that `informative` rejects."""
        return 1

    @property
    def credits_scores(self) -> bool:
        """Whether `credit` reads what the models say of the responses. If not, a step can learn while it scores."""
        return True

    @property
    def reads_penalty(self) -> bool:
        """Whether `credit` reads `kl_penalty` `[B, T]`, the KL of every token; the loop then computes it."""
        return False

    @property
    def reads_next_value(self) -> bool:
        """Whether `credit` reads `next_value` `[B]`, the critic's value after each response that a limit has cut and 0
        of others; the loop then computes it.
        """
        return False

    @property
    def selects(self) -> bool:
        """Whether `credit` chooses which responses to learn from, so that scoring all of them needs no graph."""
        return False

    def informative(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return which responses to learn from, given all rewards and groups: `[B]`, `[B]` -> `[B]` bool."""
        return torch.ones_like(rewards, dtype=torch.bool)

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `advantage` `[B, T]`, and all other columns that `loss` reads, to this process's rollouts of a step.

        All processes call this together; statistics over the whole step come from `processes`.
        """
        raise NotImplementedError

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return statistics of the credited rollouts of all processes, in addition to those of every algorithm."""
        return {}

    def write(self, folder: Path, step: int, rollouts: Rollouts, processes: Processes) -> None:
        """Write files of a step to the run's folder, in addition to the record; all processes call this together."""

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, T]`: every learned token counts once."""
        return batch["learned"]
