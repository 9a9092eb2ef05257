"""Print how often the doctor is right on trained episodes.

    python -m benchmarks.faults.episodes.trained.evaluate FOLDER

Each run is diagnosed twice: as it is, and as a record of another trainer that knows no settings.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import cavesson
from benchmarks.faults.case import Case
from benchmarks.faults.document import table
from benchmarks.faults.episodes.rules import NAMES
from benchmarks.faults.episodes.trained.planted import FAULTS
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.record import Run


class Foreign:
    """A run without its settings, as if another trainer had recorded it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.info = {"trainer": "verl", "algorithm": run.info["algorithm"]}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


@dataclass(frozen=True)
class Judged:
    """What was said of one run."""

    case: Case
    named: tuple[str, ...]
    """Causes, the gravest first; without notes of rules that do not read episodes"""
    since: int | None = None
    """The step at which the first right cause is said to have begun"""

    @property
    def causes(self) -> tuple[str, ...]:
        """Names that are right."""
        return FAULTS[self.case.name].causes if self.case.faults else ()

    @property
    def true(self) -> tuple[str, ...]:
        """Names that are not wrong."""
        return (*self.causes, *(FAULTS[self.case.name].also if self.case.faults else ()))

    @property
    def is_named(self) -> bool:
        """Whether a right cause is named."""
        return any(one in self.causes for one in self.named)

    @property
    def is_first(self) -> bool:
        """Whether a right cause is named first."""
        return bool(self.named) and self.named[0] in self.causes

    @property
    def wrong(self) -> list[str]:
        """Names that are wrong."""
        return [one for one in self.named if one not in self.true]


def judged(folder: Path, *, foreign: bool = False) -> Judged:
    """Return what the doctor says of a run."""
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    run = cavesson.open(folder)
    found = diagnose(RunData(cast(Run, Foreign(run)) if foreign else run), RULES)
    named = [one for one in found.causes if one.severity != "note" or one.rule.name in NAMES]
    one = Judged(case, tuple(cause.rule.name for cause in named))
    return Judged(case, one.named, next((x.reading.since for x in named if x.rule.name in one.causes), None))


def share(values: Iterable[bool]) -> str:
    """Return a share with its counts."""
    found = list(values)
    return f"{100 * sum(found) / len(found):.0f} % ({sum(found)} of {len(found)})" if found else "–"


def overview(parts: dict[str, Sequence[Judged]]) -> str:
    """Return the table of shares: precision over the rules on episodes, and over all rules."""
    rows = []
    for name, some in parts.items():
        sick = [one for one in some if one.case.faults]
        said = [(rule in NAMES, rule in one.true) for one in some for rule in one.named]
        healthy = [one for one in some if not one.case.faults]
        alarms = [not any(rule in NAMES for rule in one.named) for one in healthy]
        precision = share(right for own, right in said if own), share(right for _, right in said)
        rows.append([name, share(x.is_first for x in sick), share(x.is_named for x in sick), *precision, share(alarms)])
    header = ["", "named first", "named", "precision, rules on episodes", "precision, all rules"]
    return table([*header, "healthy, nothing named by rules on episodes"], rows)


def by_fault(some: Sequence[Judged]) -> str:
    """Return the table of faults."""
    found: defaultdict[str, list[Judged]] = defaultdict(list)
    for one in some:
        if one.case.faults:
            found[one.case.name].append(one)
    rows = []
    for name in FAULTS:
        off = sorted(abs(one.since - FAULTS[name].onset) for one in found[name] if one.since is not None)
        median = str(off[len(off) // 2]) if off else "–"
        rows.append([f"`{name}`", f"`{FAULTS[name].causes[0]}`", share(x.is_named for x in found[name]), median])
    return table(["fault", "cause", "named", "onset off by, steps"], rows)


def misses(some: Sequence[Judged]) -> str:
    """Return the table of runs in which something is wrong."""
    rows = [
        [one.case.folder, ", ".join(one.named) or "nothing"]
        for one in some
        if one.wrong or (one.case.faults and not one.is_first)
    ]
    return table(["run", "named"], rows) if rows else "None."


def document(folder: Path) -> str:
    """Return what is printed."""
    folders = [file.parent for file in sorted(folder.glob("*/case.json"))]
    folders = [one for one in folders if (one / "run.json").exists()]
    failed = [one.name for one in folders if (one / "failed.txt").exists()]
    own = [judged(one) for one in folders]
    theirs = list(map(partial(judged, foreign=True), folders))
    parts = {
        f"{part}{label}": [one for one in some if one.case.part == part]
        for part in ("calibration", "held out")
        for label, some in (("", own), (", without settings", theirs))
    }
    held_out = parts["held out"]
    blocks = [
        overview(parts),
        *([f"Ended early: {', '.join(failed)}."] if failed else []),
        f"By fault, held out:\n\n{by_fault(held_out)}",
        *(f"Wrong or not named first, {name}:\n\n{misses(some)}" for name, some in parts.items()),
    ]
    return "\n\n".join(blocks)


def main() -> None:
    """Print what the doctor says of all runs of a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(document(parser.parse_args().folder))


if __name__ == "__main__":
    main()
