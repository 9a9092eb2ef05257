"""The common parts of GRPO and RLOO, which compare the responses to the same prompt."""

from typing import Self

from pydantic import Field, model_validator
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.importance import ImportanceAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.algorithms.settings import UpdateSettings
from cavesson.ops import kl, losses, ratios
from cavesson.ops.groups import group_stds, varied
from cavesson.processes import Processes
from cavesson.types import Batch, Scores


class GroupAlgorithm(ImportanceAlgorithm):
    """Compares the responses to the same prompt."""

    clip_low: float = Field(0.2, gt=0)
    """ε below 1 of the clipped loss"""
    clip_high: float = Field(0.2, gt=0)
    """ε above 1 of the clipped loss; DAPO's clip-higher is 0.28"""
    dual_clip: float | None = Field(None, gt=1)
    """largest ratio that a negative advantage is multiplied by (arXiv:1912.09729); none = no limit"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus, averaged as the policy loss is; 0 = off"""
    off_policy_kl: float | None = Field(None, gt=0)
    """leave out responses with a negative advantage whose mean log π_old − log π per token is above this
    (arXiv:2512.02556); with importance weights, π_old is the sampler. none = keep all"""
    resample: int = Field(0, ge=0)
    """how many more batches of prompts a step may sample to replace groups whose rewards are all equal; 0 = off"""

    @property
    def max_batches(self) -> int:
        return 1 + self.resample

    def informative(self, rewards: Tensor, group: Tensor) -> Tensor:
        """Return which responses to learn from; with `resample`, those of groups whose rewards differ.

        `[B]`, `[B]` -> `[B]` bool
        """
        return varied(rewards, group) if self.resample else super().informative(rewards, group)

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return the mean signal and, unless all groups have one response, statistics of the step's groups."""
        rewards, group, signal = (
            processes.rows(rollouts[name]) for name in ("shaped_reward", "group_in_step", "signal")
        )
        found = super().metrics(rollouts, processes) | {"reward/signal": float(signal.mean())}
        if len(group.unique()) < len(group):
            found["group/zero_std"] = float((~varied(rewards, group)).float().mean())
            found["group/reward_std"] = float(group_stds(rewards, group).mean())
        return found

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(f"dual_clip {self.dual_clip:g} must be above 1 + clip_high, {1 + self.clip_high:g}")
        return self

    def policy_loss(self, scores: Scores, batch: Batch, ratio: Tensor) -> Tensor:
        """Return the policy loss of every token, before any weights; all `[B, T]`."""
        return losses.clipped_ratio(ratio, batch["advantage"], self.clip_low, self.clip_high, self.dual_clip)

    def learned_loss(self, scores: Scores, batch: Batch, ratio: Tensor) -> Loss:
        """Return the policy loss of a ratio with all weights, minus the entropy bonus, and metrics; all `[B, T]`."""
        old, advantage = batch["logprob"], batch["advantage"]
        policy_loss, whole = self.weighted(self.policy_loss(scores, batch, ratio), batch), {}
        if self.off_policy_kl is not None:
            kept = self._on_policy(scores, batch)
            policy_loss, whole = policy_loss * kept[:, None], {"policy/off_policy": 1 - kept}
        is_low = ((ratio < 1 - self.clip_low) & (advantage < 0)).float()
        is_high = ((ratio > 1 + self.clip_high) & (advantage > 0)).float()
        means = {
            "loss/policy": policy_loss,
            "policy/entropy": scores.entropy,
            "policy/kl": old - scores.logprob,
            "policy/approx_kl": kl.k2(scores.logprob, old),
            "policy/ratio": ratio,
            "policy/clip_fraction": is_low + is_high,
            "policy/clip_low": is_low,
            "policy/clip_high": is_high,
        }
        if self.dual_clip is not None:
            means["policy/clip_dual"] = ((ratio > self.dual_clip) & (advantage < 0)).float()
        loss = policy_loss - self.entropy_coef * scores.entropy if self.entropy_coef else policy_loss
        maxima = {"policy/ratio_max": ratio, "policy/ratio_error_max": (ratio - 1).abs()}
        return Loss(loss, {"loss/total": loss, **means}, maxima, whole)

    def _on_policy(self, scores: Scores, batch: Batch) -> Tensor:
        """Return 1 for responses that the policy may learn from, 0 for those that it has moved too far from, `[B]`."""
        assert self.off_policy_kl is not None
        sampled_by = batch["sampler_logprob" if self.importance else "logprob"]
        distance = -ratios.mean_log_ratio(scores.logprob.detach(), sampled_by, batch["learned"])
        is_worse = (batch["advantage"] < 0).any(1)
        return 1 - (is_worse & (distance > self.off_policy_kl)).float()


class OnePassSettings(UpdateSettings):
    """How the rollouts of a step update the weights."""

    epochs: int = Field(1, ge=1)
    """passes over the step's rollouts"""


class GroupRun(RolloutRun):
    """A run that compares the responses to the same prompt."""

    update: OnePassSettings = OnePassSettings()
    """how rollouts update the weights"""

    @model_validator(mode="after")
    def _check_off_policy(self) -> Self:
        if self.update.total == 1 and not self.algorithm.importance:
            self.refuse(
                f"{self.section}.off_policy_kl",
                "with one optimiser step per training step and no importance weights: log π_old − log π is 0",
            )
        return self
