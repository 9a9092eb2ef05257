"""RLOO (arXiv:2402.14740): REINFORCE with a response as one action and the mean of the others as its baseline."""

from typing import ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.grouped import GroupAlgorithm, GroupRun
from cavesson.ops import kl, ratios
from cavesson.ops.groups import group_stds, leave_one_out
from cavesson.ops.token_rewards import penalised
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Scores


class RLOO(GroupAlgorithm):
    """REINFORCE leave-one-out."""

    ratio: Literal["sequence", "token"] = "sequence"
    """π/π_old that is clipped: of the whole response, or of every token. In the first pass both are 1 and have the same
    gradient"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """estimator of the KL that is subtracted from the reward: k1 = Δ (log π − log π_ref), k2 = ½Δ², k3 = e^(−Δ) − 1 +
    Δ. Only k1 has the gradient of the KL there; the others do not keep the policy close to the reference"""
    whiten_advantages: bool = False
    """advantages get standard deviation 1 over the responses of the step; their mean is always 0"""

    @property
    def traits(self) -> Traits:
        ratio: Literal["token", "response"] = "token" if self.ratio == "token" else "response"
        return Traits(grouped=True, relative=True, clipped=True, ratio=ratio, kl_place="reward")

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `signal` `[B]`, the reward after the KL penalty, and `advantage` `[B, T]`, equal on all its tokens."""
        signal, mask = rollouts["shaped_reward"], rollouts["learned"]
        if "ref_logprob" in rollouts:
            spent = kl.ESTIMATORS[self.kl_estimator](rollouts["logprob"], rollouts["ref_logprob"])
            signal = penalised(signal, spent, mask, kl_coef)
        group = rollouts["group_in_step"]
        advantage = processes.over_all(leave_one_out, signal, group)
        if self.whiten_advantages:
            # Their mean is already 0, because the mean of every group is 0.
            advantage = advantage / (processes.over_all(group_stds, advantage, torch.zeros_like(group)) + 1e-4)
        return rollouts.with_columns(signal=signal, advantage=advantage[:, None].to(mask.dtype) * mask)

    def weights(self, batch: Batch) -> Tensor:
        """Return the weights `[B, T]`: every token counts once, or every response once if its tokens share a ratio."""
        mask = batch["learned"]
        return mask if self.ratio == "token" else mask / mask.sum(1, keepdim=True).clamp_min(1.0)

    def total(self, batch: Batch) -> Tensor:
        """Return the number of responses in the mini-batch, over which their weighted losses are averaged."""
        return torch.tensor(len(batch))

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the policy loss of every token, or of its whole response, `[B, T]`."""
        if self.ratio == "token":
            ratio = ratios.token_ratio(scores.logprob, batch["logprob"])
        else:
            ratio = ratios.response_token_ratio(scores.logprob, batch["logprob"], batch["learned"])
        return self.learned_loss(scores, batch, ratio)


class RLOORun(GroupRun):
    """Train a model with RLOO: sample several responses to each prompt and make the better ones more likely."""

    penalty_settings: ClassVar[tuple[str, ...]] = ("rloo.kl_estimator",)

    samples_per_prompt: int = Field(4, ge=1)
    """responses per prompt: the group size"""
    rloo: RLOO = RLOO()
    """the algorithm"""

    @property
    def kl_estimator(self) -> str:
        return self.rloo.kl_estimator

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.kl.coef == 0:
            self.refuse("rloo.kl_estimator", "with kl.coef 0")
        if self.samples_per_prompt == 1:
            raise ValueError("samples_per_prompt 1 leaves no other response to compare with; set it to 2 or more")
        return self
