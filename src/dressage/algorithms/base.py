"""What the loop asks of an algorithm."""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dressage.models.policy import Scores
from dressage.types import Batch


@dataclass(frozen=True)
class Loss:
    """A loss and its metrics, one number per item of the batch; what they are averaged over is decided elsewhere."""

    loss: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    """averaged exactly as the loss is"""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """the largest over the same items is taken"""


class Algorithm(Protocol):
    """`credit` says what each token earned, `weights` what is averaged over, `loss` what is minimised."""

    def credit(self, rollouts: Batch, kl_coef: float) -> Batch: ...
    def weights(self, batch: Batch) -> Tensor: ...
    def loss(self, scores: Scores, batch: Batch) -> Loss: ...
