"""The peak memory of a run, predicted from its settings, its data and its model's config.

Two steps of the run are rehearsed with fake tensors, which have a shape but no data (`allocation`), through the
functions that the run itself calls, on its largest batch. Live memory is therefore counted, not estimated, for any
architecture. Only the weights are not allocated: a safetensors file is mapped, page by page.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.check import rehearsal
from cavesson.check.allocation import Allocations, Heap, has_glibc, without_numbers
from cavesson.check.largest import LargestRollouts, LargestSequences, scored_rows
from cavesson.check.skeleton import bytes_of, config_of, layers_of, loading_bytes, skeleton
from cavesson.models.parts import trunk
from cavesson.models.settings import ModelSettings, ReferenceSettings

FEW_LAYERS = 4
"""Rehearsed of a deep model."""
QUANTIZED_BITS = {"nf4": 4.127, "int8": 8.0}
"""Bits per weight; of nf4 with its twice quantized scales (arXiv:2305.14314, section 3)."""


@dataclass(frozen=True)
class Memory:
    """The memory of a run in bytes, without Python, its libraries and the data."""

    stays: dict[str, int]
    """what is there from the first step to the last, by what it is"""
    phases: dict[str, int]
    """what comes on top of it and goes again, by when"""
    holes: int
    """what the C library's heap cannot use again, on CPU"""
    loading: int
    """all together, while the model is loaded"""

    @property
    def peak(self) -> int:
        return max(sum(self.stays.values()) + self.phases[self.phase] + self.holes, self.loading)

    @property
    def phase(self) -> str:
        """The phase that needs the most additional memory."""
        return max(self.phases, key=lambda name: self.phases[name])


def rollout_memory(
    settings: RolloutRun, largest: LargestRollouts, tokenizer: PreTrainedTokenizerBase, rewards: int, device: str
) -> Memory:
    """Predict the memory of a run that learns from its own responses.

    Args:
        settings: settings of the run.
        largest: its largest batch.
        tokenizer: tokenizer of the model.
        rewards: size of the reward models in bytes.
        device: device of the model, such as "cpu".
    """
    critic_start = _critic_model(settings)
    frozen = _reference_model(settings.model, settings.reference)
    scored = largest._replace(rows=scored_rows(settings))

    def rehearsed(layers: int | None) -> Memory:
        model = skeleton(settings.model, tokenizer, layers=layers)
        others: dict[str, nn.Module] = {}
        if frozen is not None:
            others["reference"] = skeleton(frozen, tokenizer, adapters=False, layers=layers).requires_grad_(False)
        if critic_start is not None:
            others["critic"] = trunk(skeleton(critic_start, tokenizer, adapters=False, layers=layers))
        reference, critic = others.get("reference"), others.get("critic")
        run = _Run(settings.model, device, model, others)
        with run.begun():
            for _ in range(2):  # the second step starts with the optimiser state and the heap that the first one left
                if settings.sampling.engine == "transformers":  # vLLM has its weights and its cache elsewhere
                    run.phase("sampling", lambda: rehearsal.sample(model, settings.sampling, largest))
                if not largest.single_pass:
                    run.phase("scoring", lambda: rehearsal.score([model, reference or model], critic, scored))
                run.phase("learning", lambda: rehearsal.learn(model, critic, reference, settings, largest))
                run.phase("optimiser step", run.optimise)
        return run.memory({"reward models": rewards})

    return _of_all_layers(rehearsed, settings.model)


def example_memory(
    settings: ExampleRun, largest: LargestSequences, tokenizer: PreTrainedTokenizerBase, classifier: bool, device: str
) -> Memory:
    """Predict the memory of a run that learns from examples; `classifier` means that it trains a reward model."""

    def rehearsed(layers: int | None) -> Memory:
        model = skeleton(settings.model, tokenizer, classifier=classifier, layers=layers)
        run = _Run(settings.model, device, model, {})
        with run.begun():
            for _ in range(2):
                run.phase("learning", lambda: rehearsal.learn_sequences(model, largest, classifier))
                run.phase("optimiser step", run.optimise)
        return run.memory({})

    return _of_all_layers(rehearsed, settings.model)


def _of_all_layers(rehearsed: Callable[[int | None], Memory], settings: ModelSettings) -> Memory:
    """Rehearse all layers, or extrapolate linearly from few and twice as many layers if the model is deep."""
    layers = settings.new.layers if settings.new is not None else layers_of(config_of(settings))
    if settings.new is not None or layers <= 2 * FEW_LAYERS:
        return rehearsed(None)
    few, more = rehearsed(FEW_LAYERS), rehearsed(2 * FEW_LAYERS)
    further = (layers - FEW_LAYERS) / FEW_LAYERS

    def extended(one: int, other: int) -> int:
        return round(one + (other - one) * further)

    return Memory(
        {name: extended(size, more.stays[name]) for name, size in few.stays.items()},
        {name: extended(size, more.phases[name]) for name, size in few.phases.items()},
        max(0, extended(few.holes, more.holes)),
        extended(few.loading, more.loading),
    )


@dataclass
class _Run:
    """A rehearsed run: its models, its allocations and the state of AdamW.

    AdamW keeps the averages of gradient and squared gradient in float32, 8 bytes per trainable weight. Trainable
    bfloat16 weights have a float32 copy, and gradients are in float32 (`train.optimizer`).
    """

    settings: ModelSettings
    device: str
    model: nn.Module
    others: dict[str, nn.Module]
    seen: dict[str, int] = field(default_factory=dict)
    averages: dict[nn.Parameter, tuple[Any, ...]] = field(default_factory=dict)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Allocate the permanent tensors, then run the block with fake tensors."""
        heap = Heap() if self.device == "cpu" and has_glibc() else None
        self.weights = _weights(self.model, self.settings)
        with FakeTensorMode():
            without_numbers(self.model, self.device)
            self.allocations = Allocations(heap)
            with self.allocations:
                for other in self.others.values():
                    without_numbers(other, self.device)
                self.learns = [
                    p for module in (self.model, *self.others.values()) for p in module.parameters() if p.requires_grad
                ]
                for p in self.learns:
                    p.grad_dtype = torch.float32
                self.copies = {p: p.detach().float() for p in self.learns if p.dtype != torch.float32}
                yield
        self.heap = 0 if heap is None else heap.peak
        if heap is not None:
            heap.close()

    def phase(self, name: str, work: Callable[[], None]) -> None:
        """Do some work, and record the peak of live bytes during it."""
        self.allocations.peak = self.allocations.live
        work()
        self.seen[name] = max(self.seen.get(name, 0), self.allocations.peak)

    def optimise(self) -> None:
        """Perform an optimiser step, which frees the gradients."""
        for p in self.learns:
            if p not in self.averages:
                like = self.copies.get(p, p.detach())
                self.averages[p] = torch.zeros_like(like), torch.zeros_like(like)
            p.grad = None

    def memory(self, more: dict[str, int]) -> Memory:
        """Return the memory measured in the rehearsal, plus further permanent memory by name."""
        numbers = sum(p.numel() for p in self.learns)
        made = {name: bytes_of(other.parameters()) for name, other in self.others.items()}
        made["optimiser"] = 8 * numbers + sum(4 * p.numel() for p in self.copies)
        kept = sum(made.values())
        phases = {name: max(0, seen - kept) for name, seen in self.seen.items()}
        stays = {"weights": self.weights, **made, **more}
        loading = self.weights + sum(more.values()) + loading_bytes(self.settings)
        return Memory(stays, phases, max(0, self.heap - kept - max(phases.values())), loading)


def _weights(model: nn.Module, settings: ModelSettings) -> int:
    """Return the bytes of the weights, taking quantization into account."""
    weights = bytes_of(model.parameters())
    if settings.quantization is None:
        return weights
    packed = [m.weight for m in trunk(model).modules() if isinstance(m, nn.Linear) and not m.weight.requires_grad]
    numbers = sum(weight.numel() for weight in packed)
    return weights - bytes_of(packed) + round(numbers * QUANTIZED_BITS[settings.quantization] / 8)


def _reference_model(model: ModelSettings, reference: ReferenceSettings) -> ModelSettings | None:
    """Return the settings of the frozen reference, or None if it is not a separate model."""
    start = reference.start(model.dtype)
    if start is not None:
        return ModelSettings(**dict(start))
    return model if reference.resolved(model.lora is not None) == "copy" else None


def _critic_model(settings: RolloutRun) -> ModelSettings | None:
    """Return the settings of the model that a separate critic starts from, or None if there is no such critic."""
    if settings.critic is None or not settings.critic.is_separate:
        return None
    start = settings.critic.start(settings.model.dtype)
    return settings.model if start is None else ModelSettings(**dict(start))
