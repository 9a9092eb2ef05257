"""The settings of a training run that every algorithm shares."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from dressage.config import Settings
from dressage.data.prompts import DataSettings
from dressage.models.settings import ModelSettings
from dressage.rewards.settings import RewardSettings, ShapingSettings
from dressage.sampling.settings import SamplingSettings


class KLSettings(Settings):
    """The penalty for leaving the reference."""

    coef: float = Field(0.05, ge=0)
    """β: reward = score − β · KL"""
    estimator: Literal["kl", "abs", "mse", "k3", "full"] = "kl"
    """of the penalty: kl = k1 = Δ (log π − log π_ref), abs = |Δ|, mse = k2 = ½Δ², k3 = e^(−Δ) − 1 + Δ, full = exact
    over the vocabulary; the reported objective KL is k1 whatever stands here"""
    target: float | None = Field(None, gt=0)
    """adapt β so that the objective KL (nats per response) stays near this; none = β stays fixed"""
    horizon: float = Field(10_000, gt=0)
    """responses over which β adapts: one step changes it by at most 0.2 · responses / horizon"""


class UpdateSettings(Settings):
    """How one step's rollouts become new weights."""

    epochs: int = Field(4, ge=1)
    """passes over the step's rollouts"""
    mini_batches: int = Field(1, ge=1)
    """optimiser steps per pass"""
    micro_batch_size: int = Field(0, ge=0)
    """responses in memory at a time, when scoring and when training; 0 = all. It changes no number but rounding"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """gradients are scaled down to this norm; none = off"""
    max_ratio: float | None = Field(10.0, gt=1)
    """skip an optimiser step whose mean ratio π/π_old is over this; the skipped step changes nothing; none = off"""
    target_policy_kl: float | None = Field(None, gt=0)
    """end the step's updates when KL(π_old ‖ π) per token passes 1.5 times this; none = off"""


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


class RunSettings(Settings):
    """What every run has, whatever its algorithm."""

    run: Path = Path("runs/run")
    """the run's folder; it must not exist yet"""
    seed: int = Field(0, ge=0)
    """with the same seed a run is the same, bit for bit on CPU"""
    steps: int = Field(100, ge=1)
    """training steps: sample, score, update"""
    batch_size: int = Field(64, ge=1)
    """responses per step, over all processes"""
    samples_per_prompt: int = Field(1, ge=1)
    """responses sampled to the same prompt within a step"""
    model: ModelSettings = ModelSettings()
    """the policy"""
    data: DataSettings = DataSettings()
    """the prompts"""
    sampling: SamplingSettings = SamplingSettings()
    """how responses are sampled"""
    rewards: tuple[RewardSettings, ...] = ()
    """what is rewarded; written [[rewards]] in a recipe"""
    shaping: ShapingSettings = ShapingSettings()
    """what happens to the reward before training uses it"""
    update: UpdateSettings = UpdateSettings()
    """how rollouts become new weights"""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW"""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """what a killed run continues from"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.samples_per_prompt:
            raise ValueError(
                f"batch_size {self.batch_size} is no multiple of samples_per_prompt {self.samples_per_prompt}"
            )
        if self.update.mini_batches > self.batch_size:
            raise ValueError(f"{self.update.mini_batches} mini-batches cannot be made of {self.batch_size} responses")
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature 0 always takes the likeliest token; training must explore")
        if self.shaping.normalise and not self.shaping.scale:
            raise ValueError("shaping.normalise needs shaping.scale")
        return self
