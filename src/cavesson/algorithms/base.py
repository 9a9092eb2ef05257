"""The interface between the training loops and an algorithm."""

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
    """A loss and its metrics, one number per item of the batch; the caller computes the averages."""

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
        """The maximum number of batches of prompts per step, to replace groups that `informative` rejects."""
        return 1

    def informative(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return which responses to learn from, given all rewards and groups: `[B]`, `[B]` -> `[B]` bool."""
        return torch.ones_like(rewards, dtype=torch.bool)

    def credit(self, rollouts: Batch, kl_coef: float) -> Batch:
        """Add `advantage` `[B, T]`, and all other columns that `loss` reads, to all rollouts of a step."""
        raise NotImplementedError

    def metrics(self, rollouts: Batch) -> dict[str, float]:
        """Return statistics of all credited rollouts of a step, in addition to those of every algorithm."""
        return {}

    def leave(self, folder: Path, step: int, rows: Mapping[str, Sequence[Any]], rollouts: Batch) -> None:
        """Write files of a step besides the record; `rows` holds the texts and names of the rollouts."""

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, T]`: every response token counts once."""
        return batch["mask"]

    def total(self, batch: Batch) -> Tensor:
        """Return the number that the weighted sum over a whole mini-batch is divided by."""
        return self.weights(batch).sum()

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the loss, with one number per item of `weights`."""
        raise NotImplementedError
