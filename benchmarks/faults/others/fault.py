"""What a planted fault is, and what the doctor should say of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.faults.others.case import LATE, TRAINERS, WAYS
from benchmarks.faults.others.plan import Plan

RECORDER, BOARD, COMPLETIONS = WAYS
TOKENS = (RECORDER, BOARD)
"""Visible wherever tokens are recorded."""
Ways = Sequence[str]


@dataclass(frozen=True)
class Fault:
    """One way to break a run."""

    name: str
    causes: tuple[str, ...]
    """Findings of which one should be named first, decided before anything was run."""
    also: tuple[str, ...]
    """Findings that are true of such a run as well: consequences, which are not counted as wrong."""
    seen: Mapping[str, Ways]
    """Trainer → the ways of recording whose columns determine the fault. Elsewhere it cannot be excluded."""
    plant: Callable[[Plan], None]
    begins: float = 0.0
    """After which share of the run it begins."""

    @property
    def trainers(self) -> tuple[str, ...]:
        """The trainers that it can be planted in."""
        return tuple(self.seen)

    def onset_in(self, steps: int) -> int:
        """Return the step at which the fault begins in a run of this many steps."""
        return round(self.begins * steps)

    def late(self) -> "Fault":
        """Return the same fault, beginning in the middle of the run."""
        return replace(self, name=self.name + LATE, begins=0.5)


def fault(
    *,
    causes: Sequence[str],
    seen: Ways | Mapping[str, Ways],
    also: Sequence[str] = (),
    trainers: Sequence[str] = TRAINERS,
    begins: float = 0.0,
) -> Callable[[Callable[[Plan], None]], Fault]:
    """Make a fault of a function that plants it; its name is the function's, with hyphens.

    Args:
        causes: As in ``Fault``.
        seen: The ways of recording that determine it, for each trainer or for all of ``trainers``.
        also: As in ``Fault``.
        trainers: The trainers that it can be planted in, where ``seen`` does not say.
        begins: As in ``Fault``.
    """
    by_trainer = seen if isinstance(seen, Mapping) else dict.fromkeys(trainers, seen)

    def made(plant: Callable[[Plan], None]) -> Fault:
        return Fault(plant.__name__.replace("_", "-"), tuple(causes), tuple(also), by_trainer, plant, begins)

    return made
