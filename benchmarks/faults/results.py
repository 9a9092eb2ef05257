"""What the doctor says of the runs of the benchmark."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cavesson
from benchmarks.faults.case import Case
from benchmarks.faults.planted import FAULTS
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.names import KINDS
from cavesson.doctor.rules import RULES
from cavesson.record import Run

SCALARS = frozenset(["info", "steps"])
"""What is left where only scalars are recorded."""
LOOKS = (4, 6, 8, 12, 16, 24, 28, 32, 36, 40, 48)
"""Numbers of steps after which a growing run is looked at, to see how soon a fault is named."""
FALL = 0.1
"""How much of the gain of a healthy run the true reward may lose before a fault has done damage."""
GAIN = 1.2
"""By how much the true reward of the usual run rises."""


@dataclass(frozen=True)
class Result:
    """What was said of one run."""

    case: Case
    steps: int = 0
    named: tuple[str, ...] = ()
    """Causes, the gravest first; notes, which are only worth a look, where they are what was planted"""
    folded: tuple[str, ...] = ()
    """What was found too, and is explained by a cause"""
    skipped: tuple[str, ...] = ()
    """Rules that could not be applied"""
    caught: int | None = None
    """Steps after which it was first named"""
    since: int | None = None
    """Step at which the first right cause is said to have begun"""
    between: tuple[int, int] | None = None
    """The interval of this step"""
    fell: int | None = None
    """Step at which the true reward had fallen"""

    @property
    def accepted(self) -> list[tuple[str, ...]]:
        """The causes that name each of the planted faults rightly."""
        return [FAULTS[name].causes for name in self.case.faults]

    @property
    def onset(self) -> int:
        """The step at which the fault, of a run with one, began."""
        return self.case.onset or FAULTS[self.case.faults[0]].onset

    @property
    def right(self) -> list[bool]:
        """Whether each name is right."""
        return [any(name in causes for causes in self.accepted) for name in self.named]


class Until:
    """A run as it stood after some steps."""

    def __init__(self, run: Any, steps: int) -> None:
        self._run, self._steps = run, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def _cut(self, table: pa.Table) -> pa.Table:
        return table.filter(pc.less(table["step"], self._steps))

    def steps(self) -> pa.Table:
        """Return its metrics."""
        return self._cut(self._run.steps())

    def rows(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return its rollouts."""
        return cast(pa.Table, self._run.rows(columns, range(self._steps)))

    def not_finite(self) -> pa.Table:
        """Return where its numbers are none."""
        return self._cut(self._run.not_finite())


def case_of(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))


def names(diagnosis: Diagnosis, accepted: Collection[str]) -> list[str]:
    """Return the causes that are said, without notes that nobody planted."""
    return [one.rule.name for one in diagnosis.causes if one.severity != "note" or one.rule.name in accepted]


def accepted_of(case: Case) -> frozenset[str]:
    """Return the causes that name a planted fault rightly."""
    return frozenset(cause for name in case.faults for cause in FAULTS[name].causes)


def said_of(run: Run, case: Case, sees: Collection[str] = KINDS) -> Result:
    """Let the doctor look at a run.

    Args:
        run: What is looked at.
        case: What it was made of.
        sees: Kinds of data that the rules may see.
    """
    data = RunData(run, sees)
    found = diagnose(data, RULES)
    accepted = accepted_of(case)
    first = next((one.reading for one in found.causes if one.rule.name in accepted), None)
    return Result(
        case,
        since=None if first is None else first.since,
        between=None if first is None else first.between,
        steps=len(data.steps),
        named=tuple(names(found, accepted)),
        folded=tuple(one.rule.name for one in found.findings if not one.cause),
        skipped=tuple(one.rule for one in found.skipped),
    )


def result_of(folder: Path, early: bool = False) -> tuple[Result, Result]:
    """Return what is said of a run of the benchmark, and of its scalars alone.

    Args:
        folder: Of the run.
        early: Whether to find out how soon a fault is named.
    """
    case = case_of(folder)
    if not (folder / "run.json").exists():
        return Result(case), Result(case)
    run = cavesson.open(folder)
    found = said_of(run, case)
    if early and any(found.right):
        found = replace(found, caught=_caught(run, case, found.steps))
    return replace(found, fell=_fell(folder)), said_of(run, case, SCALARS)


def _caught(run: Run, case: Case, steps: int) -> int:
    """Return after how many steps a fault that is named in the end was first named."""
    accepted = accepted_of(case)
    own = [rule for rule in RULES if rule.name in accepted]
    for look in LOOKS:
        if look >= steps:
            break
        # What its own rules do not see yet, all rules together would not name.
        until = RunData(cast(Run, Until(run, look)))
        if diagnose(until, own).causes and accepted & set(names(diagnose(until, RULES), accepted)):
            return look
    return steps


def _fell(folder: Path) -> int | None:
    """Return the step at which the true reward, a mean over three steps, had fallen from the best it had been."""
    if not (folder / "gold.json").exists():
        return None
    gold = np.array(list(json.loads((folder / "gold.json").read_text(encoding="utf-8")).values()))
    if len(gold) < 3:
        return None
    mean = np.convolve(gold, np.ones(3) / 3, "valid")
    fallen = np.flatnonzero(np.maximum.accumulate(mean) - mean > FALL * GAIN + 2 * _noise(gold))
    return int(fallen[0]) + 2 if len(fallen) else None


def _noise(gold: Any) -> float:
    """Return the standard deviation of a mean over three steps, from the differences of neighbours."""
    return float(np.median(np.abs(np.diff(gold))) / 0.954 / np.sqrt(3))
