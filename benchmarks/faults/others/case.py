"""Which run is which, and which half of the benchmark it belongs to.

Nothing but the standard library: imported by TRL 1.10's own environment as well.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

TRAINERS = ("ppo", "grpo", "rloo")
TASKS = ("couplets", "smol")
WAYS = ("recorder", "board", "completions")
"""Cavesson's TRL recorder, RL Logging Board's JSON lines, the trainer's own table of completions."""
LATE = "-late"
"""Ends the name of a fault that begins in the middle of a run."""


class Case(NamedTuple):
    """One run."""

    name: str
    """Of the fault or of the healthy kind."""
    healthy: bool
    trainer: str
    task: str
    seed: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.name}--{self.trainer}--{self.task}--{self.seed}"

    @property
    def half(self) -> str:
        """``open`` or ``closed``."""
        return half(self.name)


def half(name: str) -> str:
    """Return the half of a fault or healthy kind: ``open`` may be looked at, ``closed`` may not.

    A hash of the name decides, and a fault that begins late is in the half of the same fault from step 0: a rule that
    was tuned on one would otherwise be judged on the other.
    """
    return ("open", "closed")[sha256(name.removesuffix(LATE).encode()).digest()[0] % 2]


def read_case(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8"))["case"])
