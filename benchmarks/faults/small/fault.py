"""A fault: what breaks, what should be said of it, and in which records it can be seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.faults.small.plan import TRAINERS, Plan
from benchmarks.faults.small.recordings import FULL, TEXT, USUAL

TOKENS = (FULL, USUAL)
EVERYWHERE = (FULL, USUAL, TEXT)


@dataclass(frozen=True)
class Fault:
    """One way to break a run."""

    name: str
    causes: tuple[str, ...]
    """Findings of which one should be named first, decided before anything was run"""
    also: tuple[str, ...]
    """Findings that are true of such a run as well: consequences, which are not counted as wrong"""
    seen: tuple[str, ...]
    """The records that determine it"""
    trainers: tuple[str, ...]
    plant: Callable[[Plan], None]
    late: bool = False
    """Whether it begins in the middle of the run"""


def fault(
    causes: str,
    seen: Sequence[str],
    also: str = "",
    trainers: Sequence[str] = TRAINERS,
    late: bool = False,
) -> Callable[[Callable[[Plan], None]], Fault]:
    """Make a fault of a function that plants it; its name is the function's, with hyphens.

    Args:
        causes: As in ``Fault``, separated by spaces.
        seen: As in ``Fault``.
        also: As in ``Fault``, separated by spaces.
        trainers: Those that it can be planted in.
        late: As in ``Fault``.
    """

    def made(plant: Callable[[Plan], None]) -> Fault:
        name = plant.__name__.replace("_", "-")
        return Fault(name, tuple(causes.split()), tuple(also.split()), tuple(seen), tuple(trainers), plant, late)

    return made
