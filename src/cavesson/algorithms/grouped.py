"""The common parts of GRPO and RLOO, which compare the responses to the same prompt."""

from pydantic import Field
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.importance import ImportanceAlgorithm
from cavesson.algorithms.settings import UpdateSettings
from cavesson.ops import kl, losses
from cavesson.ops.groups import group_stds, varied
from cavesson.processes import Processes
from cavesson.types import Batch, Scores


class GroupAlgorithm(ImportanceAlgorithm):
    """Compares the responses to the same prompt."""

    clip_low: float = Field(0.2, gt=0)
    """ε below 1 of the clipped loss"""
    clip_high: float = Field(0.2, gt=0)
    """ε above 1 of the clipped loss; DAPO's clip-higher is 0.28"""
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

    def clipped(self, scores: Scores, batch: Batch, ratio: Tensor) -> Loss:
        """Return the clipped policy loss of a ratio, with importance weights, and metrics; all `[B, T]`."""
        old, advantage = batch["logprob"], batch["advantage"]
        loss = self.weighted(losses.clipped_ratio(ratio, advantage, self.clip_low, self.clip_high), batch)
        is_low = ((ratio < 1 - self.clip_low) & (advantage < 0)).float()
        is_high = ((ratio > 1 + self.clip_high) & (advantage > 0)).float()
        means = {
            "loss/total": loss,
            "loss/policy": loss,
            "policy/entropy": scores.entropy,
            "policy/kl": old - scores.logprob,
            "policy/approx_kl": kl.k2(scores.logprob, old),
            "policy/ratio": ratio,
            "policy/clip_fraction": is_low + is_high,
            "policy/clip_low": is_low,
            "policy/clip_high": is_high,
        }
        return Loss(loss, means, {"policy/ratio_max": ratio, "policy/ratio_error_max": (ratio - 1).abs()})


class OnePassSettings(UpdateSettings):
    """How the rollouts of a step update the weights."""

    epochs: int = Field(1, ge=1)
    """passes over the step's rollouts"""
