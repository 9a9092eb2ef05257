"""GRPO (arXiv:2402.03300): rewards are compared with those of the responses to the same prompt, without a critic."""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.grouped import GroupAlgorithm, GroupRun
from cavesson.algorithms.settings import CoefficientSettings
from cavesson.errors import UserError
from cavesson.ops import kl, losses, ratios
from cavesson.ops.groups import centred, group_stds, over_mean
from cavesson.ops.token_rewards import penalised, soft_overlong
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Scores


class GRPO(GroupAlgorithm):
    """Group relative policy optimisation, with the variants of later papers."""

    baseline: Literal["group", "batch"] = "group"
    """what is subtracted from a reward: the mean of its group (the responses to the same prompt), or of the step"""
    scale: Literal["group", "batch", "none", "mean"] = "group"
    """what the result is divided by: the standard deviation of the group, or of the step; nothing (Dr. GRPO); or the
    mean of the group (MaxRL), for rewards of 0 or more"""
    normalise: Literal["token", "sequence", "constant"] = "token"
    """how token losses are averaged: "token" = mean over all tokens (DAPO); "sequence" = mean over responses of the
    mean over their tokens (the original GRPO); "constant" = sum / (responses · longest) (Dr. GRPO)"""
    longest: int | None = Field(None, ge=1)
    """tokens of the longest response allowed, for normalise "constant" and overlong "penalty"; none = the sampling
    limit"""
    ratio: Literal["token", "sequence"] = "token"
    """π/π_old of every token, or the geometric mean over its response (GSPO)"""
    loss_type: Literal["clipped", "cispo"] = "clipped"
    """"clipped": PPO's clipped loss; a token whose ratio is clipped has no gradient. "cispo": log π, weighted by the
    ratio up to 1 + clip_high, so that every token has a gradient"""
    overlong: Literal["keep", "filter", "penalty"] = "keep"
    """responses cut at the length limit: "keep" = train on them; "filter" = do not; "penalty" = subtract up to 1 from
    the reward of all long responses"""
    overlong_buffer: int | None = Field(None, ge=1)
    """tokens before `longest` over which the penalty of overlong "penalty" grows from 0 to 1"""
    kl_in: Literal["loss", "reward"] = "loss"
    """where β · KL goes: added to the loss of every token, or its sum subtracted from the response's reward"""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """k1 = Δ (log π − log π_ref), k2 = ½Δ², k3 = e^(−Δ) − 1 + Δ; none = k3 in the loss and k1 in the reward, where only
    k1 has the gradient of the KL. In the loss, k1 has no gradient on average"""
    kl_unbiased: bool = False
    """multiply the KL of a token in the loss by its π/π_old, as π_old sampled the token (arXiv:2512.02556)"""

    @property
    def estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the KL; the default depends on `kl_in`."""
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    @property
    def traits(self) -> Traits:
        return Traits(
            grouped=True,
            relative=True,
            clipped=True,
            ratio=self.ratio,
            kl_place=self.kl_in,
            length_normalised=self.normalise == "sequence",
        )

    @property
    def credits_scores(self) -> bool:
        """Whether the KL is part of the reward."""
        return self.kl_in == "reward"

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `signal` `[B]`, the reward after all penalties, and `advantage` `[B, T]`, equal on all its tokens."""
        signal, mask = rollouts["shaped_reward"] + self._overlong_penalty(rollouts), rollouts["learned"]
        if self.kl_in == "reward" and "ref_logprob" in rollouts:
            spent = kl.ESTIMATORS[self.estimator](rollouts["logprob"], rollouts["ref_logprob"])
            signal = penalised(signal, spent, mask, kl_coef)
        advantage = self._compared(signal, rollouts["group_in_step"], processes)
        return rollouts.with_columns(signal=signal, advantage=advantage[:, None].to(mask.dtype) * mask)

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return statistics of groups, signal, penalty and importance weights of the step."""
        found = super().metrics(rollouts, processes)
        if self.overlong == "penalty":
            penalty = self._overlong_penalty(rollouts)
            found["reward/overlong_penalty"] = float(processes.mean(penalty, torch.ones_like(penalty)))
        return found

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, T]` of the tokens, 0 for those of a filtered response."""
        kept = batch["learned"] * batch["ended"][:, None] if self.overlong == "filter" else batch["learned"]
        lengths = batch["learned"].sum(1, keepdim=True).clamp_min(1.0)
        return kept / lengths if self.normalise == "sequence" else kept

    def total(self, batch: Batch) -> Tensor:
        """Return the number that the weighted sum over a mini-batch is divided by."""
        return torch.tensor(len(batch) * self._limit()) if self.normalise == "constant" else super().total(batch)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the policy loss − entropy_coef · entropy, + β · KL if it is in the loss; per token `[B, T]`."""
        if self.ratio == "token":
            ratio = ratios.token_ratio(scores.logprob, batch["logprob"])
        else:
            ratio = ratios.sequence_token_ratio(scores.logprob, batch["logprob"], batch["learned"])
        learned = self.learned_loss(scores, batch, ratio)
        loss, means = learned.loss, dict(learned.means)
        if self.kl_in == "loss" and "ref_logprob" in batch:
            penalty = kl.ESTIMATORS[self.estimator](scores.logprob, batch["ref_logprob"])
            if self.kl_unbiased:
                penalty = penalty * ratios.token_ratio(scores.logprob, batch["logprob"])
            means["loss/kl"] = penalty
            loss = loss + batch["kl_coef"][:, None] * penalty
        # A response has a single ratio, which its first token has too, so a long one must not count more often.
        whole = {} if self.ratio == "token" else {"policy/ratio": means.pop("policy/ratio")[:, 0]}
        return Loss(loss, {**means, "loss/total": loss}, learned.maxima, {**learned.response_means, **whole})

    def policy_loss(self, scores: Scores, batch: Batch, ratio: Tensor) -> Tensor:
        if self.loss_type == "cispo":
            return losses.weighted_likelihood(scores.logprob, ratio, batch["advantage"], self.clip_high)
        return super().policy_loss(scores, batch, ratio)

    def _compared(self, signal: Tensor, group: Tensor, processes: Processes) -> Tensor:
        if self.scale == "mean":
            lowest = float(processes.rows(signal).min())
            if lowest < 0:
                raise UserError(
                    f'grpo.scale "mean" needs rewards of 0 or more, and a response got {lowest:.6g}: '
                    'change the reward, or set grpo.scale to "group"'
                )
            return processes.over_all(over_mean, signal, group)
        over = {"group": group, "batch": torch.zeros_like(group)}
        advantage = processes.over_all(centred, signal, over[self.baseline])
        if self.scale == "none":
            return advantage
        return advantage / (processes.over_all(group_stds, signal, over[self.scale]) + 1e-4)

    def _overlong_penalty(self, batch: Batch) -> Tensor:
        if self.overlong != "penalty" or self.overlong_buffer is None:
            return torch.zeros_like(batch["shaped_reward"])
        return soft_overlong(batch["learned"].sum(1), self._limit(), self.overlong_buffer)

    def _limit(self) -> int:
        assert self.longest is not None, "GRPORun.algorithm fills it in"
        return self.longest


class PenaltySettings(CoefficientSettings):
    """The KL penalty, which keeps the policy close to the reference."""

    coef: float = Field(0.0, ge=0)
    """β: weight of the KL, which `grpo.kl_in` puts in the loss or in the reward"""


class GRPORun(GroupRun):
    """Train a model with GRPO: sample several responses to each prompt and make the better ones more likely."""

    penalty_settings: ClassVar[tuple[str, ...]] = ("grpo.kl_in", "grpo.kl_estimator")

    samples_per_prompt: int = Field(8, ge=1)
    """responses per prompt: the group size"""
    grpo: GRPO = GRPO()
    """the algorithm"""
    kl: PenaltySettings = PenaltySettings()
    """the KL penalty, which keeps the policy close to the reference"""

    @property
    def algorithm(self) -> GRPO:
        """The algorithm, with the sampling limit as `longest` if that is not set."""
        algorithm: GRPO = super().algorithm
        return algorithm.model_copy(update={"longest": self.grpo.longest or self.longest_episode})

    @property
    def rewards_are_scaled(self) -> bool:
        return self.shaping.parts == "normalised" or (self.grpo.scale != "none" and self.grpo.kl_in == "loss")

    @property
    def kl_estimator(self) -> str:
        return self.grpo.estimator

    @model_validator(mode="after")
    def _check_loss(self) -> Self:
        if self.kl.coef == 0 and self.grpo.kl_in == "reward":
            raise ValueError('grpo.kl_in "reward" has no effect with kl.coef 0; set kl.coef')
        if self.kl.coef == 0 or self.grpo.kl_in == "reward":
            self.refuse("grpo.kl_unbiased", 'without a KL in the loss; set kl.coef, and grpo.kl_in to "loss"')
        if self.grpo.loss_type == "cispo":
            for name in ("clip_low", "dual_clip"):
                self.refuse(f"grpo.{name}", 'with loss_type "cispo", which limits a ratio by clip_high only')
        return self

    @model_validator(mode="after")
    def _check_grpo(self) -> Self:
        grpo = self.grpo
        if self.samples_per_prompt == 1 and ("group" in (grpo.baseline, grpo.scale) or grpo.resample):
            raise ValueError(
                "samples_per_prompt 1 leaves nothing to compare a response with; set it to 2 or more, or "
                'grpo.baseline = "batch" with a grpo.scale other than "group" and no grpo.resample'
            )
        if (grpo.overlong == "penalty") != (grpo.overlong_buffer is not None):
            raise ValueError('grpo.overlong "penalty" and grpo.overlong_buffer need each other: set both or neither')
        longest = grpo.longest or self.longest_episode
        if longest < self.longest_episode:
            raise ValueError(f"grpo.longest {longest} is less than the sampling length limit {self.longest_episode}")
        if grpo.overlong_buffer is not None and grpo.overlong_buffer > longest:
            raise ValueError(
                f"grpo.overlong_buffer {grpo.overlong_buffer} is more than the longest response, {longest}"
            )
        if grpo.normalise != "constant" and grpo.overlong != "penalty":
            self.refuse("grpo.longest", 'without normalise "constant" or overlong "penalty"')
        return self

    @model_validator(mode="after")
    def _check_mean(self) -> Self:
        if self.grpo.scale != "mean":
            return self
        if self.grpo.baseline == "batch":
            raise ValueError('grpo.scale "mean" needs the mean of the group as baseline, too; remove grpo.baseline')
        lowers = {
            'grpo.kl_in "reward"': self.grpo.kl_in == "reward",
            'grpo.overlong "penalty"': self.grpo.overlong == "penalty",
            'shaping.parts "normalised"': self.shaping.parts == "normalised",
            "shaping.subtract_query": self.shaping.subtract_query,
            "shaping.normalise": self.shaping.normalise,
            "shaping.missing_eos_penalty": self.shaping.missing_eos_penalty > 0,
        }
        if name := next((name for name, is_set in lowers.items() if is_set), None):
            raise ValueError(
                f'grpo.scale "mean" needs rewards of 0 or more, and {name} lowers them; remove it, or set another scale'
            )
        if self.shaping.clip is None:
            self.refuse("shaping.scale", 'with grpo.scale "mean": advantages do not depend on the unit of the reward')
        return self
