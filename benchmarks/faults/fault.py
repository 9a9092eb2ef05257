"""What a planted fault is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.setup import Setup

ONLINE = ("ppo", "grpo", "rloo")


@dataclass(frozen=True)
class Fault:
    """One way to break a run, at three severities."""

    name: str
    causes: tuple[str, ...]
    """The rules that name it rightly, decided before anything was run; the first is the best."""
    levels: tuple[Any, Any, Any]
    """From mild to severe."""
    algorithms: tuple[str, ...]
    plant: Callable[[Setup, Any], None]
    onset: int = 0
    """The step from which it is there."""


def fault(
    *, causes: Sequence[str], levels: tuple[Any, Any, Any], algorithms: Sequence[str] = ONLINE, onset: int = 0
) -> Callable[[Callable[[Setup, Any], None]], Fault]:
    """Make a fault of a function that plants it; its name is the function's, with hyphens."""

    def made(plant: Callable[[Setup, Any], None]) -> Fault:
        return Fault(plant.__name__.replace("_", "-"), tuple(causes), levels, tuple(algorithms), plant, onset)

    return made
