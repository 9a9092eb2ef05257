"""What the loops ask of an algorithm."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from cavesson.config import Settings
from cavesson.models.policy import Scores
from cavesson.types import Batch


@dataclass(frozen=True)
class Loss:
    """A loss and its metrics, one number per item of the batch; what they are averaged over is decided elsewhere."""

    loss: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    """averaged by the weights that the loss is weighted with"""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """the largest over the same items is taken"""


class Algorithm(Protocol):
    """`weights` says what is averaged over, `loss` what is minimised; `scores` is what the model says of the batch."""

    def weights(self, batch: Batch) -> Tensor: ...
    def total(self, batch: Batch) -> Tensor: ...
    def loss(self, scores: Any, batch: Batch) -> Loss: ...


class RolloutAlgorithm(Settings):
    """Learns from responses that the policy sampled: `credit` says what each token of them earned."""

    @property
    def most_batches(self) -> int:
        """How many batches of prompts a step may sample at most, to replace groups that `informative` rejects."""
        return 1

    def informative(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Which responses can be learned from, given rewards and groups of all: `[B]`, `[B]` -> `[B]` bool."""
        return torch.ones_like(rewards, dtype=torch.bool)

    def credit(self, rollouts: Batch, kl_coef: float) -> Batch:
        """Add `advantage` `[B, T]`, and whatever else `loss` reads, to all rollouts of a step."""
        raise NotImplementedError

    def metrics(self, rollouts: Batch) -> dict[str, float]:
        """Statistics of all credited rollouts of a step beside those that every algorithm has."""
        return {}

    def leave(self, folder: Path, step: int, rows: Mapping[str, Sequence[Any]], rollouts: Batch) -> None:
        """Write what a step is to leave on disk beside the record; `rows` are the texts and names of the rollouts."""

    def weights(self, batch: Batch) -> Tensor:
        """Every response token counts once: `[B, T]`."""
        return batch["mask"]

    def total(self, batch: Batch) -> Tensor:
        """What the weighted sum over a whole mini-batch is divided by: a number."""
        return self.weights(batch).sum()

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """One number per item of `weights`."""
        raise NotImplementedError
