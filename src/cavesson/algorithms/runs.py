"""The settings of runs, and values derived from them; the run class of each algorithm is one of the two kinds."""

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator
from torch import nn

from cavesson.algorithms.base import Algorithm, KLUse
from cavesson.algorithms.importance import CAP, ImportanceAlgorithm
from cavesson.algorithms.settings import (
    BatchSettings,
    CheckpointSettings,
    CoefficientSettings,
    DoctorSettings,
    EvaluationSettings,
    OptimizerSettings,
    ParallelSettings,
    RaySettings,
    RolloutCheckpointSettings,
    RolloutRaySettings,
    UpdateSettings,
)
from cavesson.config import Settings
from cavesson.data.settings import ChatSettings, PromptSettings
from cavesson.data.types import Answered, Pair, Prompt
from cavesson.errors import UserError
from cavesson.findings.finding import Results
from cavesson.integrations.trackers import Names
from cavesson.models.settings import (
    ModelSettings,
    OtherModelSettings,
    ReferenceSettings,
    StartSettings,
    TeacherSettings,
    ValueSettings,
)
from cavesson.object_storage import checked_url
from cavesson.processes import Processes
from cavesson.rollout.engines.settings import SamplingSettings
from cavesson.rollout.rewards.cleaning import CleaningSettings
from cavesson.rollout.rewards.settings import RewardSettings, ShapingSettings
from cavesson.rollout.settings import EnvironmentSettings
from cavesson.types import Batch

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cavesson.data.examples import Examples
    from cavesson.models.policy import Policy


class RunSettings(Settings):
    """Settings of every run, whatever its algorithm."""

    run: Path = Path("runs/run")
    """the run's folder; it must not exist yet"""
    record: str | None = None
    """URL at which the record is written, such as "s3://bucket/run"; checkpoints and model stay in the run's folder.
    None = in that folder"""
    seed: int = Field(0, ge=0)
    """runs with the same seed are the same, bit for bit on CPU"""
    model: ModelSettings = ModelSettings()
    """the model to train"""
    data: ChatSettings = ChatSettings()
    """the data"""
    evaluation: EvaluationSettings = EvaluationSettings()
    """evaluation on held-out rows of the data"""
    parallel: ParallelSettings = ParallelSettings()
    """how training is spread over processes"""
    ray: RaySettings = RaySettings()
    """how a run is spread over a Ray cluster, with `--ray`"""
    optimizer: OptimizerSettings = OptimizerSettings()
    """AdamW"""
    trackers: Names = ()
    """where metrics are sent in addition to the record: "tensorboard", "wandb", "trackio", "mlflow", or several of
    them"""
    project: str = "cavesson"
    """the project of the run in W&B, Trackio and MLflow"""

    makes_models: ClassVar[bool] = False
    """whether the run can begin with `model.new`"""

    @field_validator("record")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        try:
            return None if url is None else checked_url(url)
        except UserError as error:
            raise ValueError(f"{error}; without one, the record is in the run's folder") from None

    @property
    def record_place(self) -> Path | str:
        """The folder or URL of the record."""
        return self.record or self.run

    @model_validator(mode="after")
    def _check_run(self) -> Self:
        if not set(self.trackers) - {"tensorboard"}:
            self.refuse("project", "without a tracker that has projects, such as wandb")
        if self.makes_classifier and self.model.quantization is not None:
            raise ValueError(
                "a reward model cannot be trained on quantized weights, because its adapters are merged into them at "
                "the end; remove model.quantization"
            )
        if self.parallel.shard != "none" and self.model.quantization == "int8":
            raise ValueError('int8 weights cannot be sharded; set model.quantization to "nf4", or remove it')
        if self.parallel.shard != "none":
            self.refuse("model.compile", "with parallel.shard: sharded layers are never compiled")
        if self.model.new is not None and not self.makes_models:
            raise ValueError("model.new has no effect here: only cavesson sft makes new models")
        if self.evaluation.every and not self.data.holds_out:
            raise ValueError("evaluation.every has no effect without held-out rows; set data.validation")
        return self

    @property
    def algorithm(self) -> Any:
        """The algorithm: the group of settings that is one."""
        return getattr(self, self.section)

    @property
    def section(self) -> str:
        """The name of the group of settings that is the algorithm."""
        return next(name for name, value in self if isinstance(value, Algorithm))

    @property
    def makes_classifier(self) -> bool:
        """Whether the trained model is a sequence classifier; otherwise it is a causal language model."""
        return bool(self.algorithm.traits.classifier)

    @property
    def maps_weights(self) -> bool:
        """Whether weights stay in their files until they are sharded.

        DoRA starts from the norms of whole weights, and quantization changes all of them.
        """
        lora = self.model.lora
        reads = self.model.quantization is not None or (lora is not None and lora.dora)
        return self.parallel.shard != "none" and not reads

    def starts(self) -> dict[str, StartSettings]:
        """Return the models that are loaded before the first step, by the names of their groups of settings."""
        others = {name: value.start(self.model.dtype) for name, value in self if isinstance(value, OtherModelSettings)}
        start = None if self.model.new is not None else self.model
        return {name: model for name, model in {"model": start, **others}.items() if model is not None}

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """Return the tokenizer of the model before training."""
        from cavesson.models.trained import load_start_tokenizer

        return load_start_tokenizer(self.model)

    def facts(self) -> dict[str, Any]:
        """Return what run.json states in addition to the settings, for readers that do not know the algorithms."""
        return {"section": self.section, "traits": self.algorithm.traits._asdict()}

    def show(self, folder: Path, console: "Console") -> None:
        """Print results of a finished run other than its metrics."""


class RolloutRun(RunSettings):
    """A run that trains on responses it samples itself."""

    steps: int = Field(100, ge=1)
    """training steps: sample, score, update"""
    batch_size: int = Field(64, ge=1)
    """responses per step, over all processes"""
    samples_per_prompt: int = Field(1, ge=1)
    """responses per prompt and step"""
    data: PromptSettings = PromptSettings()
    """the prompts"""
    sampling: SamplingSettings = SamplingSettings()
    """how responses are sampled"""
    ray: RolloutRaySettings = RolloutRaySettings()
    """how a run is spread over a Ray cluster, with `--ray`"""
    environment: EnvironmentSettings = EnvironmentSettings()
    """tools and environments that answer the policy"""
    rewards: tuple[RewardSettings, ...] = ()
    """the reward functions; written [[rewards]] in a recipe"""
    cleaning: CleaningSettings = CleaningSettings()
    """where responses are cut, and which are discarded"""
    shaping: ShapingSettings = ShapingSettings()
    """how the reward is changed before training uses it"""
    kl: CoefficientSettings = CoefficientSettings()
    """the KL penalty, which keeps the policy close to the reference"""
    reference: ReferenceSettings = ReferenceSettings()
    """the reference model"""
    update: UpdateSettings = UpdateSettings()
    """how rollouts update the weights"""
    checkpoint: RolloutCheckpointSettings = RolloutCheckpointSettings()
    """the saved states from which a run resumes"""
    doctor: DoctorSettings = DoctorSettings()
    """the doctor, which reads the record while the run trains"""

    @property
    def algorithm(self) -> Any:
        """The algorithm, with its cap of importance weights if that is not set."""
        algorithm = super().algorithm
        if isinstance(algorithm, ImportanceAlgorithm) and algorithm.importance is None:
            return algorithm.model_copy(update={"importance": 0.0 if self.sampling.declared.exact else CAP})
        return algorithm

    @property
    def longest_episode(self) -> int:
        """The most tokens of an episode after its first prompt; without an environment, of a response."""
        return self.environment.longest(self.sampling.longest)

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if isinstance(self.algorithm, ImportanceAlgorithm) and not self.algorithm.importance:
            for name in ("importance_level", "importance_mode"):
                self.refuse(f"{self.section}.{name}", f"without importance weights; set {self.section}.importance")
        return self

    @model_validator(mode="after")
    def _check_episodes(self) -> Self:
        self.environment.longest(self.sampling.longest)
        return self

    @property
    def critic(self) -> ValueSettings | None:
        """The settings of the critic, or None if the algorithm has no critic."""
        has_critic = self.algorithm.traits.critic
        return next((value for _, value in self if isinstance(value, ValueSettings)), None) if has_critic else None

    @property
    def local_teacher(self) -> TeacherSettings | None:
        """The settings of a teacher that is loaded beside the policy, or None without one."""
        return None

    @property
    def teacher_servers(self) -> tuple[str, ...]:
        """The URLs of a teacher on servers."""
        return ()

    @property
    def own_share(self) -> float:
        """The share of the responses that the policy samples; the data give all others."""
        return 1.0

    @property
    def row_kind(self) -> type[Prompt]:
        """What a row of the data becomes."""
        return Prompt if self.own_share == 1 else Answered

    @property
    def divergence(self) -> float | None:
        """The β of the divergence from the teacher that the loss reads, or None if it reads none."""
        return None

    def check_signal(self, is_rewarded: bool) -> None:
        """Raise a UserError unless there is something to learn from, given whether anything rewards responses."""
        if not is_rewarded:
            raise UserError("no reward is given: add [[rewards]] to the recipe, or pass rewards=")

    @property
    def kl_estimator(self) -> str:
        """The estimator of the KL penalty."""
        return "k1"

    @property
    def kl_use(self) -> KLUse | None:
        """Where the KL is applied, and its estimator; None if the algorithm has no KL penalty."""
        place = self.algorithm.traits.kl_place
        return KLUse(place, self.kl_estimator) if place else None

    @property
    def kl_coef(self) -> float | None:
        """β at the start; None if the algorithm has no KL penalty."""
        return self.kl.coef if self.kl_use else None

    @property
    def smallest_batch(self) -> int:
        """The minimum number of responses in a step; every batch size is a multiple of it."""
        return self.samples_per_prompt

    @property
    def rewards_are_scaled(self) -> bool:
        """Whether rewards are divided by their standard deviation, or by their mean, before the KL penalty is added."""
        return False

    @property
    def credit_decay(self) -> float | None:
        """The share γλ of a token's credit that the token before it gets, or None if all tokens share one credit."""
        return None

    def policy(self, model: "PreTrainedModel") -> "Policy":
        """Return the initial policy of a model without adapters, with its critic, reference and teacher."""
        from cavesson.models.policy import build_policy

        return build_policy(
            model,
            self.model,
            self.critic,
            self.reference,
            self.scoring_temperature,
            self.shares_prompts,
            self.maps_weights,
            self.local_teacher,
            self.divergence,
        )

    def facts(self) -> dict[str, Any]:
        use = self.kl_use
        kl = {} if use is None else {"kl": use._asdict()}
        return super().facts() | kl | {"rewards_are_scaled": self.rewards_are_scaled}

    penalty_settings: ClassVar[tuple[str, ...]] = ()
    """dotted names of the algorithm's settings that have no effect without a KL penalty"""

    def learned_from(self, responses: int) -> int:
        """Return how many of a step's responses are learned from."""
        return responses

    def most_learned(self, share: int) -> int:
        """Return how many of the responses that a step learns from a process may have, of `share` that are its own."""
        return share

    @property
    def has_single_pass(self) -> bool:
        """Whether a step can learn from the forward pass that scores its responses, because it makes one update."""
        return self.update.total == 1 and not self.algorithm.selects

    @property
    def scoring_temperature(self) -> float:
        """The temperature that divides the logits of policy and reference when responses are scored."""
        return self.sampling.temperature

    def sampling_temperature(self, step: int) -> float:
        """Return the temperature at which the responses of a training step are sampled."""
        return self.sampling.temperature

    @property
    def shares_prompts(self) -> bool:
        """Whether scoring and learning process a prompt once for all its responses in a micro-batch.

        With gradient checkpointing, this is not possible: activations that are recomputed in the backward pass cannot
        be kept as keys and values. Micro-batches that are filled by tokens do not keep the responses to a prompt
        together. On a GPU, packed or compiled passes take its place.
        """
        several = self.samples_per_prompt > 1 and self.update.micro_batch_size != 1
        together = several and self.update.micro_batch_tokens is None
        return together and not self.model.gradient_checkpointing

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_size % self.samples_per_prompt:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of samples_per_prompt {self.samples_per_prompt}"
            )
        if self.update.mini_batches > self.batch_size:
            raise ValueError(
                f"update.mini_batches {self.update.mini_batches} is more than the {self.batch_size} responses of a step"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature 0 always takes the most likely token, but training must explore; set it above 0"
            )
        total = self.update.total
        if self.checkpoint.updates and self.checkpoint.updates >= total:
            raise ValueError(
                f"checkpoint.updates {self.checkpoint.updates} has no effect with {total} optimiser steps per training "
                "step (update.epochs · update.mini_batches); set it lower, or to 0"
            )
        for name, why in self.sampling.declared.cannot.items():
            self.refuse(name, why)
        if self.model.lora is not None:
            self.refuse("sampling.vllm.transfer", "with model.lora, as adapters are sent as files")
        if self.shaping.normalise and not self.shaping.scale:
            raise ValueError("shaping.normalise needs shaping.scale")
        return self

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if self.shaping.parts == "normalised":
            self.refuse("cleaning.discard_reward", 'with shaping.parts "normalised", which sums the parts, not rewards')
            if self.samples_per_prompt == 1:
                raise ValueError(
                    'shaping.parts "normalised" compares the responses to a prompt: set samples_per_prompt'
                )
        return self

    @model_validator(mode="after")
    def _check_merged(self) -> Self:
        if self.model.lora is None:
            self.refuse("sampling.merge_adapters", "without model.lora")
        if self.sampling.merge_adapters == "always":
            if self.model.quantization is not None:
                raise ValueError('sampling.merge_adapters "always" cannot be combined with model.quantization')
            if self.parallel.shard != "none":
                raise ValueError('sampling.merge_adapters "always" cannot be combined with parallel.shard')
        return self

    @model_validator(mode="after")
    def _check_servers(self) -> Self:
        if not self.sampling.starts_server:
            self.refuse(
                "ray.servers",
                'unless the run starts vLLM servers: set sampling.engine to "vllm" and leave sampling.servers empty',
            )
        elif self.ray.learners.gpus and not self.ray.servers.gpus:
            raise ValueError("ray.servers.gpus 0 would run vLLM on CPUs while training has GPUs; set it to 1 or more")
        return self

    @model_validator(mode="after")
    def _check_penalty(self) -> Self:
        if self.kl_use is None:
            usual = type(self).model_fields["kl"].default
            if self.kl.target is not None or self.kl.coef not in (0, usual.coef):
                name = "coef" if self.kl.target is None else "target"
                raise ValueError(f"kl.{name} has no effect: {self.section} has no KL penalty")
            return self
        if self.reference.kind == "none" and self.kl.coef:
            raise ValueError(f"kl.coef {self.kl.coef:g} needs a reference; set reference.kind or kl.coef = 0")
        if self.kl.target is not None and self.kl.coef == 0:
            raise ValueError("kl.coef 0 stays 0 whatever kl.target is; set kl.coef above 0")
        most = self.batch_size * self.algorithm.max_batches
        if self.kl.target is not None and 0.2 * most >= self.kl.horizon:
            raise ValueError(
                f"kl.horizon {self.kl.horizon:g} is too short for the {most} responses that a step may sample: "
                f"it could make the coefficient negative; set it above {0.2 * most:g}"
            )
        return self


class ExampleRun(RunSettings):
    """A run that trains on given examples."""

    epochs: float = Field(1.0, gt=0)
    """passes over the examples; `steps`, if set, overrides it"""
    steps: int | None = Field(None, ge=1)
    """optimiser steps; none = as many as `epochs` needs"""
    batch_size: int = Field(32, ge=1)
    """examples per optimiser step, over all processes"""
    update: BatchSettings = BatchSettings()
    """how a batch updates the weights"""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """the saved states from which a run resumes"""
    data: ChatSettings = ChatSettings()
    """the examples"""

    row_kind: ClassVar[type[Any]] = Pair
    """what a row of the data becomes: one of the kinds of `data.types`"""
    added: ClassVar[tuple[str, ...]] = ()
    """columns `[B]` of a batch that `loss` reads, and that are not of the examples but of `prepare` or `completed`"""

    @property
    def evaluation_size(self) -> int:
        """The number of examples that are evaluated at a time.

        It is limited because there may be many examples, although nothing is kept for a backward pass.
        """
        return self.update.micro_batch_size or self.batch_size

    @property
    def loads_reference(self) -> bool:
        """Whether another model scores the examples before the first step."""
        return False

    @property
    def scores_more(self) -> bool:
        """Whether `completed` scores responses, besides those that a step learns from."""
        return False

    def steps_over(self, size: int | None, done: int = 0, used: int = 0) -> int | None:
        """Return the number of steps of the run with `size` examples, or None if `size` is needed but not known.

        `done` steps, perhaps of a run that was to be shorter, have used `used` examples.
        """
        if self.steps is not None:
            return self.steps
        if size is None:
            return None
        left = self._passed(size) - used
        return done + (-(-left // self.batch_size) if left > 0 else left // self.batch_size)

    def batch_size_at(self, start: int, size: int | None) -> int:
        """Return the number of examples in the step that follows `start` examples; the last step may be smaller."""
        if self.steps is not None or size is None:
            return self.batch_size
        return min(self.batch_size, self._passed(size) - start)

    def _passed(self, size: int) -> int:
        """Return the number of examples in all passes over `size` examples, exactly: 1.1 · 100 is 110, not more."""
        return math.ceil(Fraction(str(self.epochs)) * size)

    def arranged(self, examples: Sequence[Any]) -> list[int]:
        """Return the order in which the examples of a step are divided into micro-batches."""
        rows = list(range(len(examples)))
        return sorted(rows, key=lambda row: examples[row].size) if self.update.layout == "grouped" else rows

    def examples(self, tokenizer: "PreTrainedTokenizerBase") -> "Examples[Any]":
        """Read the examples."""
        raise NotImplementedError

    def load_model(self, tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedModel":
        """Return the model before training, without adapters."""
        from cavesson.models.trained import load_start

        return load_start(self.model, self.model.quantization, self.maps_weights, self.model.device)

    def role(self, model: Any) -> nn.Module:
        """Wrap a model so that, given a batch, it computes what the algorithm's loss needs."""
        raise NotImplementedError

    def prepare(
        self, examples: "Examples[Any]", role: Any, processes: Processes, folder: Path, step: int
    ) -> "Examples[Any]":
        """Add to the examples what must be computed before the next step, `step`; `role` wraps the model."""
        return examples

    def completed(self, batch: Batch, rows: Sequence[int], role: Any, processes: Processes) -> Batch:
        """Return a batch with the columns that are statistics of all of it, before it is split into micro-batches.

        All processes call this together, each with its rows, in training and in evaluation.
        """
        return batch

    def judged(self, examples: "Examples[Any]") -> Results:
        """Judge settings and examples together, for `cavesson check`."""
        return iter(())

    def finished(self, model: Any) -> Any:
        """Return the model in the form in which it is saved."""
        return model

    def report(
        self,
        role: Any,
        tokenizer: "PreTrainedTokenizerBase",
        examples: "Examples[Any]",
        processes: Processes,
        folder: Path,
    ) -> None:
        """Write a report on the trained model, which `role` wraps, to the run's folder."""
