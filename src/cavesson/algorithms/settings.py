"""Groups of settings that several algorithms share."""

from typing import Literal, Self

from pydantic import Field, model_validator

from cavesson.config import Settings


class CoefficientSettings(Settings):
    """How much leaving the reference costs."""

    coef: float = Field(0.05, ge=0)
    """β: reward = score − β · KL"""
    target: float | None = Field(None, gt=0)
    """adapt β so that the objective KL (nats per response) stays near this; none = β stays fixed"""
    horizon: float = Field(10_000, gt=0)
    """responses over which β adapts: one step changes it by at most 0.2 · responses / horizon"""

    @model_validator(mode="after")
    def _check_horizon(self) -> Self:
        if self.target is None:
            self.refuse("horizon", "without target, which makes the coefficient adapt")
        return self


class KLSettings(CoefficientSettings):
    """The penalty for leaving the reference."""

    estimator: Literal["kl", "abs", "mse", "k3", "full"] = "kl"
    """of the penalty: kl = k1 = Δ (log π − log π_ref), abs = |Δ|, mse = k2 = ½Δ², k3 = e^(−Δ) − 1 + Δ, full = exact
    over the vocabulary. Only kl has the gradient of the KL in the reward; the others do not hold the policy. The
    reported objective KL is k1 whatever stands here"""


class OptimizeSettings(Settings):
    """How a batch becomes an optimiser step."""

    micro_batch_size: int = Field(0, ge=0)
    """sequences in memory at a time; 0 = all. It changes no number but rounding"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """gradients are scaled down to this norm; none = off"""


class UpdateSettings(OptimizeSettings):
    """How one step's rollouts become new weights."""

    epochs: int = Field(4, ge=1)
    """passes over the step's rollouts"""
    mini_batches: int = Field(1, ge=1)
    """optimiser steps per pass"""
    max_ratio: float | None = Field(10.0, gt=1)
    """skip an optimiser step whose mean ratio π/π_old is over this; the skipped step changes nothing; none = off"""
    target_policy_kl: float | None = Field(None, gt=0)
    """end the step's updates when KL(π_old ‖ π) per token passes 1.5 times this; none = off"""

    @property
    def total(self) -> int:
        """The number of optimiser steps per training step."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.total == 1:
            self.refuse("target_policy_kl", "with one optimiser step per training step: there is none left to skip")
        return self


class OptimizerSettings(Settings):
    """AdamW (arXiv:1711.05101)."""

    learning_rate: float = Field(1e-5, gt=0)
    """at its highest"""
    betas: tuple[float, float] = (0.9, 0.999)
    """decay of the averages of gradient and squared gradient"""
    eps: float = Field(1e-8, gt=0)
    """added to the root of the squared gradient"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """from the end of the warm-up to the last step: stay, or fall to zero"""
    warmup_steps: int = Field(0, ge=0)
    """training steps over which the learning rate rises from zero"""


class CheckpointSettings(Settings):
    """What a killed run continues from."""

    every: int = Field(10, ge=0)
    """steps between checkpoints; 0 = only at the end"""
    keep: int = Field(2, ge=1)
    """the newest ones that stay on disk"""

    @property
    def is_single(self) -> bool:
        """Whether there is only one checkpoint, at the end."""
        return self.every == 0

    @model_validator(mode="after")
    def _check_keep(self) -> Self:
        if self.is_single:
            self.refuse("keep", "with every 0, which leaves one checkpoint, at the end")
        return self


class BatchSettings(OptimizeSettings):
    """How a batch of examples becomes an optimiser step."""

    layout: Literal["packed", "grouped", "padded"] = "packed"
    """of the examples in memory. "packed": several in a row, each with its own positions and attention, so that
    almost nothing is padding; "grouped": examples of similar length together; "padded": as they come. It changes no
    number but rounding"""


class RolloutCheckpointSettings(CheckpointSettings):
    """What a killed run continues from."""

    updates: int = Field(0, ge=0)
    """optimiser steps between checkpoints inside a training step, whose rollouts are then kept with them; 0 = only
    between training steps"""

    @property
    def is_single(self) -> bool:
        return self.every == self.updates == 0


class EvaluationSettings(Settings):
    """Measuring on rows that are not learned from."""

    every: int = Field(0, ge=0)
    """training steps between evaluations; 0 = only before the first step and after the last"""
