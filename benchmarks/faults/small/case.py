"""Which run is which."""

import json
from pathlib import Path

from benchmarks.faults.others import case as others
from benchmarks.faults.small.tasks import DEVELOPMENT


class Case(others.Case):
    """One run, in the part that its task is for."""

    @property
    def part(self) -> str:
        """``development`` or ``held out``."""
        return "development" if self.task in DEVELOPMENT else "held out"


def read_case(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
