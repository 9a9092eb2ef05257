"""Which run is which."""

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.small.tasks import DEVELOPMENT


class Case(NamedTuple):
    """One run."""

    name: str
    """Of the fault or of the healthy kind"""
    healthy: bool
    trainer: str
    task: str
    seed: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.name}--{self.trainer}--{self.task}--{self.seed}"

    @property
    def part(self) -> str:
        """What its task is for."""
        return "development" if self.task in DEVELOPMENT else "held out"


def read_case(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
