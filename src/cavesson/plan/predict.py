"""The prediction for a run on given devices, and for the same run with other settings."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.errors import UserError
from cavesson.models.device_memory import free_memory
from cavesson.models.load import with_pad_token
from cavesson.models.parts import row_shape
from cavesson.models.settings import ModelSettings
from cavesson.plan.choice import ROOM, chosen
from cavesson.plan.devices import DEVICES, MEASURES, Device
from cavesson.plan.largest import largest_rollouts, largest_sequences, learned_rows
from cavesson.plan.limits import limits
from cavesson.plan.memory import example_memory, rollout_memory
from cavesson.plan.prediction import Memory, Place
from cavesson.plan.recipe import Planned
from cavesson.plan.skeleton import bytes_of, skeleton, trained_config
from cavesson.plan.time import Duration, example_times, rollout_times
from cavesson.plan.vllm import vllm_times
from cavesson.registry import engines
from cavesson.text.toml_value import toml_value
from cavesson.train.by_plan import left_to_plan, with_choices
from cavesson.train.prompts import conversation_of, prompts_of

Run = RolloutRun | ExampleRun


@dataclass(frozen=True)
class Prediction:
    """The memory of a device and the time of a step."""

    memory: Memory
    times: dict[str, Duration]
    """of the parts of a step"""
    overlaps: bool
    """whether decoding goes on beside the rest of a step"""
    limits: tuple[str, ...]
    """what is not predicted of these settings, or assumed"""

    @property
    def seconds(self) -> float:
        """The time of a step."""
        parts = {name: part.total for name, part in self.times.items()}
        decoding = parts.get("decoding", 0.0)
        rest = sum(parts.values()) - decoding
        return max(decoding, rest) if self.overlaps else decoding + rest


class Predictor:
    """Predicts a run and variants of it, whose data is read once.

    Args:
        planned: the run.
        device: the device of each process.
        processes: number of devices.

    Raises:
        UserError: the model or the data cannot be read, or there are more devices than responses or examples.
    """

    def __init__(self, planned: Planned, device: Device, processes: int) -> None:
        settings = planned.settings
        self.device, self.processes = device, processes
        problem = self._problem(settings)
        if problem is not None:
            raise UserError(problem)
        self.place = Place(processes, device.per_host, device.memory)
        self.tokenizer: PreTrainedTokenizerBase = with_pad_token(settings.load_tokenizer(), settings.model.path)
        self.data: Any = (
            prompts_of(settings, self.tokenizer, conversation_of(settings, self.tokenizer), kind=settings.row_kind)
            if isinstance(settings, RolloutRun)
            else settings.examples(self.tokenizer)
        )
        self.rewards = sum(self._reward_bytes(planned))

    def predict(self, settings: Run) -> Prediction:
        """Predict a run with these settings."""
        values = self.chosen(settings, self.device.memory)
        settings = with_choices(settings, values)
        said = [f"{name} = {toml_value(value)} is what auto chooses here" for name, value in values.items()]
        if isinstance(settings, RolloutRun):
            rollouts = largest_rollouts(settings, self.data, self.processes)
            memory = self.memory(settings)
            times = rollout_times(settings, rollouts, memory, self.device, self.processes)
            if not settings.sampling.declared.local:
                times |= vllm_times(settings, rollouts, memory, self.device, self.processes)
            overlaps = settings.sampling.max_staleness > 0
        else:
            shape = row_shape(trained_config(settings.model, self.tokenizer))
            sequences = largest_sequences(settings, self.data, shape, self.processes)
            memory = self.memory(settings)
            times, overlaps = example_times(settings, sequences, memory, self.device, self.processes), False
        return Prediction(memory, times, overlaps, (*said, *limits(settings, memory)))

    def memory(self, settings: Run) -> Memory:
        """Predict only the memory of a run with these settings."""
        if isinstance(settings, RolloutRun):
            rollouts = largest_rollouts(settings, self.data, self.processes)
            return rollout_memory(settings, rollouts, self.tokenizer, self.rewards, self.place)
        shape = row_shape(trained_config(settings.model, self.tokenizer))
        sequences = largest_sequences(settings, self.data, shape, self.processes)
        return example_memory(settings, sequences, self.tokenizer, settings.makes_classifier, self.place)

    def chosen(self, settings: Run, free: float) -> dict[str, Any]:
        """Return the values of the settings that are left to the plan, for so many bytes of free memory."""
        return chosen(settings, lambda run: self.memory(run).peak <= ROOM * free)

    def variants(self, settings: Run) -> Iterator[tuple[str, Prediction]]:
        """Yield the settings that could help, one at a time, and the prediction for each."""
        for setting, value in _candidates(settings, self.processes):
            changed = _with(settings, setting, value)
            if changed is not None and self._problem(changed) is None:
                yield f"{setting} = {toml_value(value)}", self.predict(changed)

    def _problem(self, settings: Run) -> str | None:
        """Return why a run with these settings would not begin on these devices, or None."""
        shard, count = settings.parallel.shard, self.processes
        if settings.batch_size < count:
            return f"batch_size {settings.batch_size} is less than the {count} devices of --gpus"
        if settings.update.in_backward and count > 1:
            return "update.in_backward needs a single device: with several, use parallel.shard"
        if count == 1 and shard != "none":
            return f'parallel.shard "{shard}" has no effect with one device: use --gpus N, or set it to "none"'
        if shard == "hybrid" and count <= self.device.per_host:
            return f'parallel.shard "hybrid" needs several hosts, and all {count} devices are on one: use "full"'
        return None

    def _reward_bytes(self, planned: Planned) -> Iterator[int]:
        for reward in planned.rewards:
            if "path" in reward.options:
                model = ModelSettings(path=str(reward.options["path"]), dtype=reward.options.get("dtype", "float32"))
                yield bytes_of(skeleton(model, self.tokenizer, classifier=True).parameters())


def choose(settings: Run, device: torch.device) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the settings that a run of one process leaves to the plan, and a note for the user on them.

    Raises:
        UserError: the device is not a GPU, or the model or the data cannot be read.
    """
    if device.type != "cuda":
        names = " and ".join(left_to_plan(settings))
        raise UserError(f'{names} = "auto" is planned for GPUs only; on a CPU, set a value: {MEASURES}')
    rewards = settings.rewards if isinstance(settings, RolloutRun) else ()
    free = free_memory(device)
    # Only the times depend on the kind of GPU.
    kind = replace(DEVICES["h100"], name=device.type, memory=free, per_host=1)
    predictor = Predictor(Planned("the run", "", settings, rewards, False), kind, 1)
    values = predictor.chosen(settings, free)
    peak = predictor.memory(with_choices(settings, values)).peak
    said = " and ".join(f"{name} = {toml_value(value)}" for name, value in values.items())
    return values, [f"{said}, by the plan: {peak / 1e9:.1f} of {free / 1e9:.1f} GB of free memory"]


def _candidates(settings: Run, processes: int) -> Iterator[tuple[str, Any]]:
    shard = settings.parallel.shard
    if processes > 1 and shard != "hybrid":
        yield "parallel.shard", "full" if shard == "none" else "hybrid"
    if settings.model.gradient_checkpointing is not True:
        yield "model.gradient_checkpointing", True
    if not settings.update.in_backward:
        yield "update.in_backward", True
    for other in _other_micro_batches(settings, processes):
        yield "update.micro_batch_size", other
    if settings.model.dtype == "float32":
        yield "model.dtype", "bfloat16"
    if settings.model.lora is None:
        yield "model.lora.rank", 16
    if isinstance(settings, RolloutRun) and settings.sampling.declared.local:
        yield from (("sampling.engine", name) for name, engine in engines().items() if not engine.local)


def _other_micro_batches(settings: Run, processes: int) -> set[int]:
    """Return half and twice the size of a micro-batch, as far as they differ from it and are not more than there is."""
    most = math.ceil(settings.batch_size / processes)
    if isinstance(settings, RolloutRun):
        most = learned_rows(settings, processes)
    rows = min(settings.update.micro_batch_size or most, most)
    return {max(1, rows // 2), min(2 * rows, most)} - {rows}


def _with(settings: Run, setting: str, value: Any) -> Run | None:
    """Return settings with one value changed, or None if they would contradict each other."""
    values = settings.model_dump(exclude_unset=True)
    *groups, name = setting.split(".")
    inside = values
    for group in groups:
        if not isinstance(inside.get(group), Mapping):
            inside[group] = {}
        inside = inside[group]
    inside[name] = value
    try:
        return type(settings).model_validate(values)
    except ValidationError:
        return None
