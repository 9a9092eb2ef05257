"""What the doctor says of a run, in each way that it was recorded."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import cavesson
from benchmarks.faults.others.case import WAYS, Case, read_case
from benchmarks.faults.others.planted import FAULTS
from benchmarks.faults.others.recordings import PPO_COLUMNS
from benchmarks.faults.results import names
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES
from cavesson.importers import import_run
from cavesson.record import Run

FORMATS = {"board": "rl-logging-board", "completions": "trl"}
FIRST_STEP = {"recorder": 0, "board": 0, "completions": 1}
"""The number of a run's first step: TRL counts the steps that have ended."""


@dataclass(frozen=True)
class Judged:
    """What was said of one recording of one run."""

    case: Case
    way: str
    steps: int = 0
    named: tuple[str, ...] = ()
    """Causes, the gravest first."""
    since: int | None = None
    """The step at which the first right cause is said to have begun, counted from 0."""
    onset: int = 0
    """The step at which it did begin."""
    not_excluded: tuple[str, ...] = ()
    """What is not said to be excluded."""

    @property
    def causes(self) -> tuple[str, ...]:
        """Names that are right."""
        return () if self.case.healthy else FAULTS[self.case.name].causes

    @property
    def true(self) -> tuple[str, ...]:
        """Names that are not wrong: causes and true consequences."""
        return () if self.case.healthy else (*self.causes, *FAULTS[self.case.name].also)

    @property
    def determined(self) -> bool:
        """Whether this recording shows the fault at all."""
        return not self.case.healthy and self.way in FAULTS[self.case.name].seen[self.case.trainer]


def judged(folder: Path) -> list[Judged]:
    """Return what the doctor says of each recording of a run."""
    case = read_case(folder)
    onset = json.loads((folder / "case.json").read_text(encoding="utf-8"))["onset"]
    with TemporaryDirectory() as place:
        return [_said(run, case, way, onset) for way, run in recordings(folder, case, Path(place))]


def recordings(folder: Path, case: Case, place: Path) -> Iterator[tuple[str, Run]]:
    """Yield each way in which a run was recorded, and the record; imports are written to ``place``."""
    for way in WAYS:
        run = folder / way
        if way in FORMATS:
            run = place / way
            if case.trainer == "ppo" and way == "completions":
                import_run(folder / way, run, "plain", PPO_COLUMNS, held_out=True)
            else:
                import_run(folder / way, run, FORMATS[way])
        yield way, cavesson.open(run)


def _not_excluded(found: Diagnosis) -> tuple[str, ...]:
    """Return the causes that a diagnosis says are possible: those that its report lists as not excluded."""
    return tuple(rule for one in not_excluded(found) for rule in one.failure.rules)


def _said(run: Run, case: Case, way: str, onset: int) -> Judged:
    data = RunData(run)
    found = diagnose(data, RULES)
    one = Judged(case, way, onset=onset)
    right = [finding for finding in found.causes if finding.rule.name in one.causes]
    since = right[0].reading.since if right else None
    return Judged(
        case,
        way,
        steps=len(data.steps),
        named=tuple(names(found, one.true)),
        since=None if since is None else since - FIRST_STEP[way],
        onset=onset,
        not_excluded=_not_excluded(found),
    )
