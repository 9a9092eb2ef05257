"""PPO (arXiv:1707.06347) with a per-token KL penalty and a learned critic, as in arXiv:1909.08593."""

from typing import Self

import torch
from pydantic import Field, model_validator

from cavesson.algorithms.base import Loss
from cavesson.algorithms.importance import ImportanceAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.algorithms.settings import KLSettings
from cavesson.models.settings import ValueSettings
from cavesson.ops import kl, losses, ratios
from cavesson.ops.advantages import gae
from cavesson.ops.masked import whiten
from cavesson.ops.token_rewards import token_rewards
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Scores


class PPO(ImportanceAlgorithm):
    """Proximal policy optimisation."""

    gamma: float = Field(1.0, ge=0, le=1)
    """discount per token"""
    lam: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation: 0 uses the critic's estimates only, 1 the observed rewards only"""
    clip: float = Field(0.2, gt=0)
    """ε of the clipped policy loss"""
    dual_clip: float | None = Field(None, gt=1)
    """largest ratio that a negative advantage is multiplied by (arXiv:1912.09729); none = no limit"""
    value_clip: float = Field(0.2, gt=0)
    """largest change of a value before its loss is clipped"""
    value_coef: float = Field(0.1, ge=0)
    """weight of the value loss"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus; 0 = off"""
    bootstrap_truncated: bool = False
    """a response that a limit has cut gets the critic's value of what would follow, in place of its score"""
    whiten_advantages: bool = True
    """advantages get mean 0 and variance 1 over all tokens of the step"""
    whiten_rewards: bool = False
    """token rewards get variance 1 over all tokens of the step; their mean does not change"""

    @property
    def traits(self) -> Traits:
        return Traits(clipped=True, ratio="token", critic=True, kl_place="reward")

    @property
    def reads_penalty(self) -> bool:
        return True

    @property
    def reads_next_value(self) -> bool:
        return self.bootstrap_truncated

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip:
            raise ValueError(f"dual_clip {self.dual_clip:g} must be above 1 + clip, {1 + self.clip:g}")
        return self

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `token_reward` (before any whitening), `advantage` and `return`, each `[B, T]`.

        With `bootstrap_truncated`, `shaped_reward` loses the scores of responses that a limit has cut.
        """
        if self.bootstrap_truncated:
            rollouts = _without_scores_of_cut(rollouts)
        mask = rollouts["learned"]
        turns = rollouts.columns.get("turn_reward")
        rewards = token_rewards(rollouts["shaped_reward"], rollouts["kl_penalty"], mask, kl_coef, turns)
        signal = whiten(rewards, mask, False, processes.mean) if self.whiten_rewards else rewards
        advantage = gae(signal, rollouts["value"], mask, self.gamma, self.lam, rollouts.columns.get("next_value"))
        returns = advantage + rollouts["value"]
        if self.whiten_advantages:
            advantage = whiten(advantage, mask, mean=processes.mean)
        return rollouts.with_columns(**{"token_reward": rewards, "advantage": advantage, "return": returns})

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return clipped policy loss + value_coef · clipped value loss − entropy_coef · entropy, per token `[B, T]`."""
        assert scores.value is not None
        old, old_value, returns = batch["logprob"], batch["value"], batch["return"]
        ratio = ratios.token_ratio(scores.logprob, old)
        clipped_loss = losses.clipped_ratio(ratio, batch["advantage"], self.clip, self.clip, self.dual_clip)
        policy_loss = self.weighted(clipped_loss, batch)
        value_loss = losses.clipped_value(scores.value, old_value, returns, self.value_clip)
        total = policy_loss + self.value_coef * value_loss - self.entropy_coef * scores.entropy
        clipped = (ratio.clamp(1 - self.clip, 1 + self.clip) - ratio) * batch["advantage"]
        unclipped_value_loss = 0.5 * (scores.value - returns) ** 2
        value_clipped = ((scores.value - old_value).abs() > self.value_clip) & (value_loss > unclipped_value_loss)
        means = {
            "loss/total": total,
            "loss/policy": policy_loss,
            "loss/value": value_loss,
            "policy/entropy": scores.entropy,
            "policy/kl": old - scores.logprob,
            "policy/approx_kl": kl.k2(scores.logprob, old),
            "policy/ratio": ratio,
            "policy/clip_fraction": (clipped < 0).float(),
            "value/mean": scores.value,
            "value/error": (scores.value - returns) ** 2,
            "value/clip_fraction": value_clipped.float(),
        }
        maxima = {"policy/ratio_max": ratio, "policy/ratio_error_max": (ratio - 1).abs()}
        return Loss(total, means, maxima)


def _without_scores_of_cut(rollouts: Batch) -> Batch:
    """Leave a response that a limit has cut the rewards of its turns, which it was given before the cut."""
    score = rollouts["shaped_reward"]
    kept = rollouts["turn_reward"].sum(1) if "turn_reward" in rollouts else torch.zeros_like(score)
    return rollouts.with_columns(shaped_reward=torch.where(rollouts["ended"] > 0, score, kept))


class PPORun(RolloutRun):
    """Train a model with PPO: sample responses, score them, and make high-scoring responses more likely."""

    ppo: PPO = PPO()
    """the algorithm"""
    kl: KLSettings = KLSettings()
    """the KL penalty, which keeps the policy close to the reference"""
    value: ValueSettings = ValueSettings()
    """the critic"""

    @property
    def credit_decay(self) -> float:
        return self.ppo.gamma * self.ppo.lam

    @property
    def kl_estimator(self) -> str:
        return self.kl.estimator

    @model_validator(mode="after")
    def _check_bootstrap(self) -> Self:
        if self.ppo.bootstrap_truncated:
            self.refuse(
                "shaping.missing_eos_penalty",
                "with ppo.bootstrap_truncated, which replaces the scores of the same responses; remove one of the two",
            )
        return self

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self.reference.kind == "none":
            raise ValueError(
                'PPO needs a reference to measure the KL; set kl.coef = 0 instead of reference.kind "none"'
            )
        if self.value.is_separate and self.model.quantization is not None:
            raise ValueError(
                "a separate critic trains all of its weights, and quantized weights cannot be trained; "
                'set value.kind = "trunk" or model.quantization = none'
            )
        return self
