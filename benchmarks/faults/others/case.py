"""Which run is which, and which part of the benchmark it belongs to.

Nothing but the standard library: imported by TRL 1.10's own environment as well.
"""

import json
from pathlib import Path
from typing import NamedTuple

TRAINERS = ("ppo", "grpo", "rloo")
TASKS = ("couplets", "smol")
WAYS = ("recorder", "board", "completions")
"""Cavesson's TRL recorder, RL Logging Board's JSON lines, the trainer's own table of completions."""
LATE = "-late"
"""Ends the name of a fault that begins in the middle of a run."""
SECOND = frozenset({
    "scores-cached", "one-answer-for-all", "reward-clipped", "groups-of-one", "advantages-shifted", "whitening-by-row",
    "bootstrap-missing", "padding-penalised", "goes-on-after-end", "repetition-penalised", "prompt-cut", "greedy",
    "stages-swapped", "dropout-left-on", "ratio-to-reference", "controller-backwards", "warm-up-endless",
    "critic-random", "smaller-batch", "scheduled", "roomy",
})  # fmt: skip
"""Faults and healthy kinds written after the rules, and evaluated once before anybody looked at their runs."""


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
    def part(self) -> str:
        """``first`` or ``second``."""
        return part(self.name)


def part(name: str) -> str:
    """Return the part of a fault or healthy kind, ``first`` or ``second``.

    A fault that begins late is in the part of the same fault from step 0: a rule that was tuned on one would otherwise
    be judged on the other.
    """
    return "second" if name.removesuffix(LATE) in SECOND else "first"


def read_case(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8"))["case"])
