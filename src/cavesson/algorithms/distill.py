"""On-policy distillation (arXiv:2306.13649, arXiv:2306.08543): learn from a teacher on the policy's own responses."""

from typing import Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from cavesson.algorithms.base import Loss
from cavesson.algorithms.grouped import OnePassSettings
from cavesson.algorithms.importance import ImportanceAlgorithm
from cavesson.algorithms.runs import RolloutRun
from cavesson.algorithms.settings import CoefficientSettings
from cavesson.errors import UserError
from cavesson.models.settings import ReferenceSettings, TeacherSettings
from cavesson.ops import kl, losses, ratios
from cavesson.ops.groups import leave_one_out
from cavesson.processes import Processes
from cavesson.traits import Traits
from cavesson.types import Batch, Scores


class Distill(ImportanceAlgorithm):
    """On-policy distillation."""

    loss_type: Literal["sampled", "full"] = "sampled"
    """"sampled": the policy gradient whose advantage of every token is log q − log π, the teacher's log-probability
    minus the policy's; "full": the divergence of the whole distributions at every token, which needs teacher.path"""
    beta: float = Field(1.0, ge=0, le=1)
    """β of the generalised Jensen-Shannon divergence of "full" (arXiv:2306.13649, eq. 1): 1 is the reverse KL(π ‖ q),
    0 the forward KL(q ‖ π)"""
    own_share: float = Field(1.0, ge=0, le=1)
    """share of the responses that the policy samples itself; the data give the others, λ of arXiv:2306.13649"""
    clip: float = Field(0.2, gt=0)
    """ε of the clipped policy loss"""

    @property
    def traits(self) -> Traits:
        return Traits(clipped=True, ratio="token")

    @property
    def credits_scores(self) -> bool:
        return self.loss_type == "sampled"

    def credit(self, rollouts: Batch, kl_coef: float, processes: Processes) -> Batch:
        """Add `advantage` `[B, T]`: log q − log π, if the loss is of sampled tokens, plus that of the reward, if any.

        The latter is the reward minus the mean of the other responses to the prompt, the same on all tokens.
        """
        mask = rollouts["learned"]
        advantage = None if self.loss_type == "full" else kl.k1(rollouts["teacher_logprob"], rollouts["logprob"]) * mask
        if "shaped_reward" in rollouts:
            earned = processes.over_all(leave_one_out, rollouts["shaped_reward"], rollouts["group_in_step"])
            of_reward = earned[:, None].to(mask.dtype) * mask
            advantage = of_reward if advantage is None else advantage + of_reward
        return rollouts if advantage is None else rollouts.with_columns(advantage=advantage)

    def metrics(self, rollouts: Batch, processes: Processes) -> dict[str, float]:
        """Return the reverse KL to the teacher, per response and per token, and the teacher's log-probability."""
        mask, teacher = rollouts["learned"], rollouts["teacher_logprob"]
        apart = kl.k1(rollouts["logprob"], teacher)
        per_response = ratios.response_sum(apart, mask)
        return super().metrics(rollouts, processes) | {
            "teacher/kl": float(processes.mean(per_response, per_response.new_ones(len(per_response)))),
            "teacher/kl_per_token": float(processes.mean(apart, mask)),
            "logprob/teacher": float(processes.mean(teacher, mask)),
        }

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the divergence from the teacher, if it is asked for, plus the clipped policy loss, if there are
        advantages; per token `[B, T]`.
        """
        old = batch["logprob"]
        ratio = ratios.token_ratio(scores.logprob, old)
        means: dict[str, Tensor] = {}
        if scores.divergence is not None:
            means["loss/divergence"] = scores.divergence
        if "advantage" in batch:
            clipped = losses.clipped_ratio(ratio, batch["advantage"], self.clip, self.clip)
            means["loss/policy"] = self.weighted(clipped, batch)
            moved = (ratio.clamp(1 - self.clip, 1 + self.clip) - ratio) * batch["advantage"]
            means["policy/clip_fraction"] = (moved < 0).float()
        total = sum((means[name] for name in ("loss/divergence", "loss/policy") if name in means), ratio.new_zeros(()))
        means |= {
            "loss/total": total,
            "policy/entropy": scores.entropy,
            "policy/kl": old - scores.logprob,
            "policy/approx_kl": kl.k2(scores.logprob, old),
            "policy/ratio": ratio,
        }
        return Loss(total, means, {"policy/ratio_max": ratio, "policy/ratio_error_max": (ratio - 1).abs()})


class DistillRun(RolloutRun):
    """Train a model to answer like a teacher, on responses that it samples itself, with or without a reward."""

    distill: Distill = Distill()
    """the algorithm"""
    teacher: TeacherSettings = TeacherSettings()
    """the model that the policy learns from"""
    update: OnePassSettings = OnePassSettings()
    """how rollouts update the weights"""
    kl: CoefficientSettings = CoefficientSettings(coef=0.0)
    """has no effect: the policy is kept close to the teacher"""
    reference: ReferenceSettings = ReferenceSettings(kind="none")
    """a reference model, to which the KL is only measured"""

    @property
    def local_teacher(self) -> TeacherSettings | None:
        return None if self.teacher.path is None else self.teacher

    @property
    def teacher_servers(self) -> tuple[str, ...]:
        return self.teacher.servers

    @property
    def own_share(self) -> float:
        return self.distill.own_share

    @property
    def divergence(self) -> float | None:
        return self.distill.beta if self.distill.loss_type == "full" else None

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.teacher.servers and self.distill.loss_type == "full":
            raise ValueError(
                'distill.loss_type "full" needs whole distributions, and servers give the log-probabilities of single '
                "tokens: set teacher.path instead of teacher.servers"
            )
        if self.teacher.servers and self.sampling.temperature != 1:
            raise ValueError(
                f"servers give log-probabilities at temperature 1, and sampling.temperature is "
                f"{self.sampling.temperature:g}: set it to 1, or teacher.path instead of teacher.servers"
            )
        if self.distill.loss_type == "sampled":
            self.refuse("distill.beta", 'with loss_type "sampled", which is the reverse KL')
            self.refuse("distill.own_share", 'with loss_type "sampled", which needs tokens that the policy has sampled')
        return self

    def check_signal(self, is_rewarded: bool) -> None:
        if self.teacher.path is None and not self.teacher.servers:
            raise UserError("there is no teacher: set teacher.path to a model, or teacher.servers to its vLLM servers")
        if not is_rewarded:
            for name in ("shaping", "cleaning.discard"):
                self.refuse(name, "without a reward")
        elif self.distill.own_share < 1:
            raise UserError(
                f"rewards judge what the policy samples, and distill.own_share is {self.distill.own_share:g}: "
                "set it to 1, or remove the rewards"
            )
        elif self.samples_per_prompt == 1:
            raise UserError(
                "rewards compare the responses to a prompt, and samples_per_prompt is 1: set it to 2 or more"
            )
