"""The time of a step, from the operations of its stages and the rates of a device."""

import math
from dataclasses import dataclass

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.plan.devices import Device
from cavesson.plan.largest import LargestRollouts, LargestSequences, scored_rows
from cavesson.plan.operations import Work
from cavesson.plan.prediction import Memory


@dataclass(frozen=True)
class Duration:
    """Seconds of a part of a step, by what they are spent on."""

    computing: float = 0.0
    """matrix products and attention, at the device's rate"""
    moving: float = 0.0
    """operations that wait for memory"""
    starting: float = 0.0
    """what starting the operations takes beyond the two above"""
    sending: float = 0.0
    """communication that nothing overlaps with"""

    @property
    def total(self) -> float:
        return self.computing + self.moving + self.starting + self.sending

    def __add__(self, other: "Duration") -> "Duration":
        return Duration(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def __mul__(self, times: float) -> "Duration":
        return Duration(*(times * value for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return self.computing, self.moving, self.starting, self.sending


def duration(work: Work, device: Device, processes: int) -> Duration:
    """Return how long a process takes for its operations.

    An operation takes as long as its arithmetic or its memory traffic, whichever is longer (the roofline model,
    doi:10.1145/1498765.1498785). A GPU computes while Python starts further operations and while data is sent.
    """
    computing = moving = sending = 0.0
    for operation, times in work.items():
        compute = operation.flops / device.product_rate(operation.precision)
        move = operation.moved / (device.bandwidth * device.bandwidth_share)
        if compute >= move:
            computing += times * compute
        else:
            moving += times * move
        sending += times * operation.sent / device.link_rate(processes) if operation.sent else 0.0
    busy = computing + moving
    starting = max(0.0, device.per_operation * sum(work.values()) - busy)
    return Duration(computing, moving, starting, max(0.0, sending - busy - starting))


def rollout_times(
    settings: RolloutRun, largest: LargestRollouts, memory: Memory, device: Device, processes: int
) -> dict[str, Duration]:
    """Return the parts of a step of a run that samples: every response is as long as its limit."""
    share, update = math.ceil(settings.batch_size / processes), settings.update
    once = {name: duration(work, device, processes) for name, work in memory.work.items()}
    none = Duration()
    batches = math.ceil(share / largest.sampled)
    prompts, token = once.get("reading prompts", none), once.get("decoding", none)
    gathering = once.get("gathering weights", none)
    learned = math.ceil(settings.learned_from(settings.batch_size) / processes)
    passes = math.ceil(learned / update.mini_batches / largest.rows) * update.mini_batches * update.epochs
    scorings = math.ceil(share / scored_rows(settings, largest, processes))
    steps = update.epochs * update.mini_batches
    return {
        "decoding": gathering + (prompts + token * (largest.response - 1)) * batches,
        "scoring": once.get("scoring", none) * scorings,
        "update": once["learning"] * passes + once["optimiser step"] * steps,
        "gradient sum": _summed(settings, memory, device, processes) * steps,
    }


def example_times(
    settings: ExampleRun, largest: LargestSequences, memory: Memory, device: Device, processes: int
) -> dict[str, Duration]:
    """Return the parts of a step of a run that learns from examples, if all are as long as the longest."""
    learning, step = (duration(memory.work[name], device, processes) for name in ("learning", "optimiser step"))
    return {
        "update": learning * largest.passes + step,
        "gradient sum": _summed(settings, memory, device, processes),
    }


def _summed(settings: RolloutRun | ExampleRun, memory: Memory, device: Device, processes: int) -> Duration:
    """Return how long it takes to sum gradients that are not sharded over all processes, in a ring, in float32."""
    if processes == 1 or settings.parallel.shard != "none":
        return Duration()
    sent = 2 * (processes - 1) / processes * 4 * memory.trained  # in float32
    return Duration(sending=sent / device.link_rate(processes))
