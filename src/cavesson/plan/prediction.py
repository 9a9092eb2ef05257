"""What is predicted of the memory of a run, for a few layers of its model or for all."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cavesson.models.settings import ModelSettings
from cavesson.plan.operations import Work
from cavesson.plan.skeleton import config_of, layers_of

FEW_LAYERS = 2
"""Layers of a deep model that are simulated, and twice as many."""


class Place(NamedTuple):
    """The GPUs on which a run trains."""

    processes: int = 1
    per_host: int = 8
    """processes on a host"""
    memory: float = math.inf
    """bytes of its memory"""


@dataclass(frozen=True)
class Memory:
    """The memory of a process on its GPU, in bytes."""

    stays: dict[str, int]
    """permanent memory, by purpose"""
    phases: dict[str, dict[str, int]]
    """additional memory of each stage at its peak, by purpose"""
    loading: int
    """all together, while the model is loaded"""
    numbers: int
    """weights of the model that learns, as numbers, in all processes together"""
    trained: int
    """those that are trained, critic included"""
    work: dict[str, Work]
    """the operations of each stage, done once"""
    ways: tuple[str, ...] = ()
    """why passes are not packed or compiled, if they would be for other models"""

    @property
    def peak(self) -> int:
        return max(sum(self.stays.values()) + self.added(self.phase), self.loading)

    @property
    def phase(self) -> str:
        """The phase that needs the most additional memory."""
        return max(self.phases, key=self.added)

    @property
    def parts(self) -> dict[str, int]:
        """All memory at the peak, by purpose."""
        parts = {**self.stays, **self.phases[self.phase]}
        return {name: size for name, size in parts.items() if size}

    def added(self, phase: str) -> int:
        """Return the bytes that a phase adds to what stays."""
        return sum(self.phases[phase].values())


def of_all_layers(simulated: Callable[[int | None], Memory], settings: ModelSettings) -> Memory:
    """Simulate all layers, or extrapolate linearly from few and twice as many layers if the model is deep."""
    layers = settings.new.layers if settings.new is not None else layers_of(config_of(settings))
    if settings.new is not None or layers <= 2 * FEW_LAYERS:
        return simulated(None)
    few, more = simulated(FEW_LAYERS), simulated(2 * FEW_LAYERS)
    further = (layers - FEW_LAYERS) / FEW_LAYERS

    def extended(one: float, other: float) -> int:
        return max(0, round(one + (other - one) * further))

    def by_name(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
        parts = {name: extended(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
        # The peak of a deeper model may be at another moment, when one part has gone and another one has come.
        total, named = extended(sum(one.values()), sum(other.values())), sum(parts.values())
        return {name: round(size * total / named) if named else 0 for name, size in parts.items()}

    def repeated(one: Work, other: Work) -> Work:
        return Counter({key: one.get(key, 0) * (1 - further) + other.get(key, 0) * further for key in {**one, **other}})

    return Memory(
        by_name(few.stays, more.stays),
        {name: by_name(phase, more.phases[name]) for name, phase in few.phases.items()},
        extended(few.loading, more.loading),
        extended(few.numbers, more.numbers),
        extended(few.trained, more.trained),
        {name: repeated(work, more.work[name]) for name, work in few.work.items()},
        few.ways,
    )
