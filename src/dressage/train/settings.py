"""The settings of a training run that every algorithm shares."""

import difflib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dressage.config import Settings
from dressage.data.chat import ChatSettings
from dressage.data.examples import Examples
from dressage.data.prompts import PromptSettings
from dressage.index.findings import Finding
from dressage.integrations.trackers import Names
from dressage.models.settings import ModelSettings, ReferenceSettings, ValueSettings
from dressage.models.trained import load_start, load_start_tokenizer
from dressage.rewards.settings import RewardSettings, ShapingSettings
from dressage.sampling.settings import SamplingSettings
from dressage.text.cleaning import CleaningSettings


class CoefficientSettings(Settings):
    """How much leaving the reference costs."""

    coef: float = Field(0.05, ge=0)
    """β: reward = score − β · KL"""
    target: float | None = Field(None, gt=0)
    """adapt β so that the objective KL (nats per response) stays near this; none = β stays fixed"""
    horizon: float = Field(10_000, gt=0)
    """responses over which β adapts: one step changes it by at most 0.2 · responses / horizon"""


class KLSettings(CoefficientSettings):
    """The penalty for leaving the reference."""

    estimator: Literal["kl", "abs", "mse", "k3", "full"] = "kl"
    """of the penalty: kl = k1 = Δ (log π − log π_ref), abs = |Δ|, mse = k2 = ½Δ², k3 = e^(−Δ) − 1 + Δ, full = exact
    over the vocabulary; the reported objective KL is k1 whatever stands here"""


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


class EvaluationSettings(Settings):
    """Measuring on rows that are not learned from."""

    every: int = Field(0, ge=0)
    """training steps between evaluations; 0 = only before the first step and after the last"""


Answer = Literal["warn", "stop", "ignore"]


class DoctorSettings(Settings):
    """The doctor, who looks at the record while the run trains, in a process beside it."""

    on_finding: Answer = "warn"
    """what happens at a finding. "warn": it is said; "stop": the run ends and leaves a checkpoint, except at notes,
    which are only worth a look; "ignore": the doctor does not look"""
    rules: dict[str, Answer] = Field(default={})
    """another answer for the findings of some rules, such as {"length-exploited" = "stop", "stalls" = "ignore"}; "stop"
    also where another finding explains them"""
    share: float = Field(0.01, gt=0, le=1)
    """of the time that looking may take: after a look of a second the doctor rests for 1 / share seconds"""

    @property
    def looks(self) -> bool:
        """Whether anything is done about any finding."""
        return self.on_finding != "ignore" or any(answer != "ignore" for answer in self.rules.values())

    @property
    def stops(self) -> bool:
        """Whether any finding may end the run."""
        return "stop" in (self.on_finding, *self.rules.values())

    def answer(self, finding: Finding) -> Answer:
        """What is done about a finding."""
        if self.stopping(finding):
            return "stop"
        named = self.rules.get(finding.id)
        if named is None and finding.severity == "note" and self.on_finding == "stop":
            return "warn"
        return named or self.on_finding

    def stopping(self, finding: Finding) -> list[str]:
        """The consequences of a finding that are to end the run whatever they come from."""
        return [name for name in finding.consequences if self.rules.get(name) == "stop"]

    @field_validator("rules")
    @classmethod
    def _check_names(cls, rules: dict[str, Answer]) -> dict[str, Answer]:
        from dressage.doctor.own import all_rules

        rules = {name.replace("_", "-"): answer for name, answer in rules.items()}
        known = {rule.name for rule in all_rules()} if rules else set()
        for name in rules.keys() - known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ValueError(f"there is no rule {name!r}; did you mean {near[0]!r}?")
        return rules


class RunSettings(Settings):
    """What every run has, whatever its algorithm."""

    run: Path = Path("runs/run")
    """the run's folder; it must not exist yet"""
    seed: int = Field(0, ge=0)
    """with the same seed a run is the same, bit for bit on CPU"""
    model: ModelSettings = ModelSettings()
    """the model that learns"""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW"""
    trackers: Names = ()
    """where metrics are sent beside the record: "tensorboard", "wandb", "trackio", or several of them"""
    project: str = "dressage"
    """what W&B and trackio file the run under"""

    @property
    def algorithm(self) -> Any:
        """The group of settings that is the algorithm."""
        raise NotImplementedError

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model as it starts."""
        return load_start_tokenizer(self.model)

    def show(self, folder: Path, console: Console) -> None:
        """Print what a finished run has to say beside its metrics."""


class RolloutRun(RunSettings):
    """A run that learns from responses it samples itself."""

    steps: int = Field(100, ge=1)
    """training steps: sample, score, update"""
    batch_size: int = Field(64, ge=1)
    """responses per step, over all processes"""
    samples_per_prompt: int = Field(1, ge=1)
    """responses sampled to the same prompt within a step"""
    data: PromptSettings = PromptSettings()
    """the prompts"""
    sampling: SamplingSettings = SamplingSettings()
    """how responses are sampled"""
    rewards: tuple[RewardSettings, ...] = ()
    """what is rewarded; written [[rewards]] in a recipe"""
    cleaning: CleaningSettings = CleaningSettings()
    """where responses are cut, and which are discarded"""
    shaping: ShapingSettings = ShapingSettings()
    """what happens to the reward before training uses it"""
    kl: CoefficientSettings = CoefficientSettings()
    """the penalty for leaving the reference"""
    reference: ReferenceSettings = ReferenceSettings()
    """the reference"""
    update: UpdateSettings = UpdateSettings()
    """how rollouts become new weights"""
    checkpoint: RolloutCheckpointSettings = RolloutCheckpointSettings()
    """what a killed run continues from"""
    doctor: DoctorSettings = DoctorSettings()
    """who looks at the record while the run trains"""

    @property
    def critic(self) -> ValueSettings | None:
        """The critic, for algorithms that have one."""
        return None

    @property
    def penalty(self) -> str | None:
        """The estimator of the KL penalty that the loop computes, for algorithms that do not do it themselves."""
        return None

    @property
    def scoring_temperature(self) -> float:
        """What divides the logits of policy and reference when responses are scored."""
        return self.sampling.temperature

    def sampling_temperature(self, step: int) -> float:
        """What divides the logits when the responses of a training step are sampled."""
        return self.sampling.temperature

    def show(self, folder: Path, console: Console) -> None:
        from dressage.train.doctor import verdict

        if self.doctor.looks:
            for line in verdict(self.doctor, folder):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

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

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        if self.reference.kind == "none" and self.kl.coef:
            raise ValueError(f"kl.coef {self.kl.coef:g} needs a reference; set reference.kind or kl.coef = 0")
        if self.kl.target is not None and self.kl.coef == 0:
            raise ValueError("kl.coef 0 stays 0 whatever kl.target is; start from a coefficient above 0")
        most = self.batch_size * self.algorithm.most_batches
        if self.kl.target is not None and 0.2 * most >= self.kl.horizon:
            raise ValueError(
                f"kl.horizon {self.kl.horizon:g} is too short for the {most} responses that a step may sample: "
                f"it could make the coefficient negative; set it over {0.2 * most:g}"
            )
        return self


class ExampleRun(RunSettings):
    """A run that learns from examples which others made."""

    epochs: float = Field(1.0, gt=0)
    """passes over the examples"""
    steps: int | None = Field(None, ge=1)
    """optimiser steps; none = as many as the passes need"""
    batch_size: int = Field(32, ge=1)
    """examples per optimiser step, over all processes"""
    update: BatchSettings = BatchSettings()
    """how a batch becomes an optimiser step"""
    evaluation: EvaluationSettings = EvaluationSettings()
    """measuring on rows that are not learned from"""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """what a killed run continues from"""
    data: ChatSettings = ChatSettings()
    """the examples"""

    def examples(self, tokenizer: PreTrainedTokenizerBase) -> Examples[Any]:
        """Read what is learned from."""
        raise NotImplementedError

    def load_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """The model as it starts, before adapters."""
        return load_start(self.model, self.model.quantization)

    def role(self, model: Any) -> nn.Module:
        """Wrap a model so that it says of a batch what the algorithm's loss reads."""
        raise NotImplementedError

    def prepare(self, examples: Examples[Any], learner: Any, folder: Path, step: int) -> Examples[Any]:
        """Add to the examples what must be known before the next step, which is `step`."""
        return examples

    def finished(self, model: Any) -> Any:
        """The model as it is saved."""
        return model

    def report(self, trainer: Any, folder: Path) -> None:
        """Leave more than metrics about the trained model in the run's folder."""
