"""Groups of settings that several algorithms share."""

import difflib
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from cavesson.config import Settings
from cavesson.processes import Shard

if TYPE_CHECKING:
    from cavesson.findings.finding import Finding

Answer = Literal["warn", "stop", "ignore"]
"""To a finding of the doctor."""


class CoefficientSettings(Settings):
    """The weight of the KL penalty."""

    coef: float = Field(0.05, ge=0)
    """β: reward = score − β · KL"""
    target: float | None = Field(None, gt=0)
    """adapt β so that the objective KL (nats per response) stays near this; none = β is constant"""
    horizon: float = Field(10_000, gt=0)
    """responses over which β adapts: one step changes it by at most 0.2 · responses / horizon"""

    @model_validator(mode="after")
    def _check_horizon(self) -> Self:
        if self.target is None:
            self.refuse("horizon", "without target, which makes the coefficient adapt")
        return self


class KLSettings(CoefficientSettings):
    """The KL penalty, which keeps the policy close to the reference."""

    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k1"
    """estimator of the KL penalty: k1 = Δ (log π − log π_ref), k2 = ½Δ², k3 = e^(−Δ) − 1 + Δ, abs = |Δ|, full = exact
    over the vocabulary. Only k1 has the gradient of the KL in the reward; the others do not keep the policy close to
    the reference. The reported objective KL is always k1"""


class ParallelSettings(Settings):
    """How training is spread over processes, which `--processes`, torchrun or accelerate starts."""

    shard: Shard = "none"
    """"none": every process has all weights; "full": every process keeps a slice of each weight, of its gradient and of
    the optimiser's state (FSDP2), and gathers one layer at a time; "hybrid": "full" within a host, copies between
    hosts"""
    offload: bool = False
    """keep the slices of weights, gradients and the optimiser's state in the memory of the host, and only what is
    computed with on the device: room for a larger model, but slower"""
    timeout: float = Field(3600, gt=0, le=604_800)
    """seconds without progress after which the processes no longer wait: the run ends, and names the process that hangs
    and its stage. No stage of a step may take longer, such as sampling the responses"""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.shard == "none":
            self.refuse("offload", 'without shard; set shard to "full" or "hybrid"')
        return self


class RoleSettings(Settings):
    """Processes that a Ray cluster runs, and the resources that each of them takes."""

    count: int = Field(1, ge=1)
    """how many"""
    cpus: float = Field(1.0, ge=0)
    """processors of each"""
    gpus: float = Field(0.0, ge=0)
    """GPUs of each"""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Ray's custom resources of each, such as { big_memory = 1 }"""


class LearnerSettings(RoleSettings):
    """The processes that train, as those that `--processes` starts."""

    gpus: int = Field(0, ge=0, le=1)
    """GPUs of each; 1 to train on GPUs"""


class ServerSettings(RoleSettings):
    """The vLLM servers that the run starts."""

    gpus: int = Field(0, ge=0)
    """GPUs of each, all of one node; they hold the model together"""


class RewardWorkerSettings(RoleSettings):
    """The processes that call the rewards."""

    count: int = Field(0, ge=0)
    """how many; 0 = the learners call the rewards"""

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        for name in ("cpus", "gpus", "resources") if self.count == 0 else ():
            self.refuse(name, "without workers; set count")
        return self


class RaySettings(Settings):
    """How a run is spread over a Ray cluster. All of it applies only with `--ray`."""

    address: str = "auto"
    """address of the cluster, such as "10.0.0.1:6379"; "auto" = that of RAY_ADDRESS, or the
    cluster that this machine belongs to"""
    failures: int = Field(3, ge=0)
    """restarts from the latest checkpoint after a node or a process has died; after that many, the run ends"""
    timeout: float = Field(300.0, gt=0)
    """seconds that the run waits for nodes with the resources that it needs; then it ends"""
    learners: LearnerSettings = LearnerSettings()
    """the processes that train"""

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if "://" in address:
            raise ValueError('give HOST:PORT or "auto", and start the command on a node of the cluster')
        return address


class RolloutRaySettings(RaySettings):
    """How a run is spread over a Ray cluster. All of it applies only with `--ray`."""

    servers: ServerSettings = ServerSettings()
    """the vLLM servers that the run starts, if it samples with vLLM and sampling.servers names no others"""
    reward_workers: RewardWorkerSettings = RewardWorkerSettings()
    """the processes that call the rewards"""


class OptimizeSettings(Settings):
    """How a batch updates the weights."""

    micro_batch_size: int = Field(0, ge=0)
    """sequences in memory at a time; 0 = all. It has no effect on the result, except for rounding"""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """tokens in memory at a time, padding included, instead of a number of sequences; a sequence that is longer is
    alone. "auto" = as many as fit into the free memory of a GPU, as `cavesson plan` predicts it; none = by
    `micro_batch_size`. It has no effect on the result, except for rounding"""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """largest gradient norm; larger gradients are scaled down to it; none = off"""
    in_backward: bool = False
    """apply and free each gradient while the backward pass runs, so that all gradients are never in memory together.
    The backward pass runs twice, first to measure the norm. It has no effect on the result"""

    @property
    def most_tokens(self) -> int | None:
        """Tokens in a micro-batch, or None; the plan must have chosen them by now."""
        assert self.micro_batch_tokens != "auto"
        return self.micro_batch_tokens

    @model_validator(mode="after")
    def _check_in_backward(self) -> Self:
        if self.in_backward:
            for name in ("micro_batch_size", "micro_batch_tokens"):
                self.refuse(name, "with in_backward: gradients are complete only after the last micro-batch")
        if self.micro_batch_tokens is not None:
            self.refuse("micro_batch_size", "beside micro_batch_tokens; remove one of them")
        return self


class UpdateSettings(OptimizeSettings):
    """How the rollouts of a step update the weights."""

    epochs: int = Field(4, ge=1)
    """passes over the step's rollouts"""
    mini_batches: int = Field(1, ge=1)
    """optimiser steps per pass"""
    max_ratio: float | None = Field(10.0, gt=1)
    """skip an optimiser step whose mean ratio π/π_old, over tokens or over responses that have one ratio each, is above
    this; none = off"""
    target_policy_kl: float | None = Field(None, gt=0)
    """end the step's updates when KL(π_old ‖ π) per token exceeds 1.5 times this; none = off"""

    @property
    def total(self) -> int:
        """The number of optimiser steps per training step."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        if self.total == 1:
            self.refuse("target_policy_kl", "with one optimiser step per training step: there is no later one to skip")
        return self


Decay = Annotated[float, Field(ge=0, lt=1)]
"""Of a moving average."""


class OptimizerSettings(Settings):
    """AdamW (arXiv:1711.05101)."""

    learning_rate: float = Field(1e-5, gt=0)
    """peak learning rate"""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """decay of the averages of gradient and squared gradient"""
    eps: float = Field(1e-8, gt=0)
    """added to the root of the squared gradient"""
    weight_decay: float = Field(0.0, ge=0)
    """decoupled weight decay; biases, norms and value heads do not decay"""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """learning rate after the warm-up: constant, or a linear or cosine decay that would reach zero one step after the
    last"""
    warmup_steps: int = Field(0, ge=0)
    """training steps over which the learning rate rises from zero"""


class CheckpointSettings(Settings):
    """The saved states from which a run resumes."""

    every: int = Field(10, ge=0)
    """steps between checkpoints; 0 = only at the end"""
    keep: int = Field(2, ge=1)
    """number of checkpoints between steps to keep; older ones are deleted"""

    @property
    def is_single(self) -> bool:
        """Whether there is only one checkpoint, at the end."""
        return self.every == 0

    @model_validator(mode="after")
    def _check_keep(self) -> Self:
        if self.is_single:
            self.refuse("keep", "with every = 0, which saves a single checkpoint at the end")
        return self


class BatchSettings(OptimizeSettings):
    """How a batch of examples becomes an optimiser step."""

    layout: Literal["packed", "grouped", "padded"] = "packed"
    """layout of the examples in memory: "packed" = several in a row, each with its own positions and attention, with
    almost no padding; "grouped" = examples of similar length together; "padded" = in the order of the data. It has no
    effect on the result, except for rounding"""


class RolloutCheckpointSettings(CheckpointSettings):
    """The saved states from which a run resumes."""

    updates: int = Field(0, ge=0)
    """optimiser steps between checkpoints within a training step, which include its rollouts; the newest of these is
    kept. 0 = only between training steps"""

    @property
    def is_single(self) -> bool:
        return self.every == self.updates == 0


class EvaluationSettings(Settings):
    """Evaluation on held-out rows of the data: before the first step, at intervals, and after the last step."""

    every: int = Field(0, ge=0)
    """training steps between evaluations; 0 = only before the first step and after the last"""


class DoctorSettings(Settings):
    """The doctor, which examines the record in a separate process while the run trains."""

    on_finding: Answer = "warn"
    """action for a finding. "warn": report it; "stop": save a checkpoint and stop the run, except for findings of
    severity "note", which are only reported; "ignore": do not run the doctor"""
    rules: dict[str, Answer] = Field(default={})
    """actions for single rules that differ from on_finding, such as {"length-exploited" = "stop", "stalls" = "ignore"};
    "stop" also applies to a finding that another one explains"""
    share: float = Field(0.01, gt=0, le=1)
    """maximum share of the time that the doctor may take: after a diagnosis of 1 s, it pauses for 1 / share s"""

    @model_validator(mode="after")
    def _check_share(self) -> Self:
        if not self.looks:
            self.refuse("share", 'with on_finding "ignore": the doctor does not run')
        return self

    @property
    def looks(self) -> bool:
        """Whether the doctor runs at all."""
        return self.on_finding != "ignore" or any(answer != "ignore" for answer in self.rules.values())

    @property
    def stops(self) -> bool:
        """Whether any finding may end the run."""
        return "stop" in (self.on_finding, *self.rules.values())

    def answer(self, finding: "Finding") -> Answer:
        """Return the action for a finding."""
        if self.stopping(finding):
            return "stop"
        named = self.rules.get(finding.rule)
        if named is None and finding.severity == "note" and self.on_finding == "stop":
            return "warn"
        return named or self.on_finding

    def stopping(self, finding: "Finding") -> list[str]:
        """Return the consequences of a finding that stop the run even if another finding explains them."""
        return [name for name in finding.explains if self.rules.get(name) == "stop"]

    @field_validator("rules")
    @classmethod
    def _check_names(cls, rules: dict[str, Answer]) -> dict[str, Answer]:
        if not rules:
            return rules
        from cavesson.doctor.plugins import all_rules  # slow to import, and few runs name rules

        rules = {name.replace("_", "-"): answer for name, answer in rules.items()}
        known = {rule.name for rule in all_rules()}
        for name in rules.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"there is no rule {name!r}; did you mean {near[0]!r}?")
        return rules
