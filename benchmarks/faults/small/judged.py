"""What the doctor says of each record of a run."""

from dataclasses import dataclass
from pathlib import Path

import cavesson
from benchmarks.faults.results import names
from benchmarks.faults.small.case import Case, read_case
from benchmarks.faults.small.fault import Fault
from benchmarks.faults.small.planted import FAULTS
from benchmarks.faults.small.recordings import WAYS
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES


@dataclass(frozen=True)
class Judged:
    """What was said of one record of one run; with the fields that `benchmarks.faults.others.scores` reads."""

    case: Case
    way: str
    steps: int = 0
    named: tuple[str, ...] = ()
    """Causes, the gravest first"""
    errors: tuple[str, ...] = ()
    """Those of them that are errors"""
    since: int | None = None
    """The step at which the first right cause is said to have begun, counted from 0"""
    onset: int = 0
    """The step at which it did begin"""
    not_excluded: tuple[str, ...] = ()

    @property
    def fault(self) -> Fault | None:
        """What is planted."""
        return None if self.case.healthy else FAULTS[self.case.name]

    @property
    def causes(self) -> tuple[str, ...]:
        """Names that are right."""
        return self.fault.causes if self.fault else ()

    @property
    def true(self) -> tuple[str, ...]:
        """Names that are not wrong: causes and true consequences."""
        return (*self.fault.causes, *self.fault.also) if self.fault else ()

    @property
    def determined(self) -> bool:
        """Whether this record shows the fault at all."""
        return self.fault is not None and self.way in self.fault.seen

    @property
    def is_first(self) -> bool:
        """Whether a right cause is named first."""
        return bool(self.named) and self.named[0] in self.causes


def judged(folder: Path) -> list[Judged]:
    """Return what the doctor says of each record of a run."""
    case = read_case(folder)
    return [_said(folder / way, case, way) for way in WAYS if (folder / way / "run.json").exists()]


def _said(folder: Path, case: Case, way: str) -> Judged:
    data = RunData(cavesson.open(folder))
    found = diagnose(data, RULES)
    one = Judged(case, way)
    said = {finding.rule.name: finding for finding in found.causes}
    named = names(found, one.true)
    since = next((said[name].reading.since for name in named if name in one.causes), None)
    steps = len(data.steps)
    return Judged(
        case,
        way,
        steps,
        tuple(named),
        tuple(name for name in named if said[name].severity == "error"),
        since,
        steps // 2 if one.fault and one.fault.late else 0,
        tuple(rule for open_one in not_excluded(found) for rule in open_one.failure.rules),
    )


def worse_with_more(said: list[Judged]) -> list[Judged]:
    """Return what was said of records in which a fault is not named first although a record with less shows it."""
    by_run: dict[Case, list[Judged]] = {}
    for one in said:
        by_run.setdefault(one.case, []).append(one)
    found = []
    for several in by_run.values():
        best = max((WAYS.index(one.way) for one in several if one.determined and one.is_first), default=-1)
        found += [one for one in several if one.determined and not one.is_first and WAYS.index(one.way) < best]
    return found


def failure_of(folder: Path) -> str | None:
    """Return the last line of what ended a run early; None if it went to its end."""
    path = folder / "failed.txt"
    return path.read_text(encoding="utf-8").strip().splitlines()[-1] if path.exists() else None
