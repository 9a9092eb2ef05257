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
"""Written after the rules for the first part, and evaluated once before anybody looked at their runs."""
THIRD = frozenset({
    "score-everywhere", "rewards-centred", "logits-rounded", "reference-warmer", "critic-rate-high",
    "reward-in-percent", "end-unrecognised", "all-masked", "double-start", "padding-attended", "sampler-quantised",
    "adapter-merged-twice", "estimator-swapped", "loss-by-length", "part-in-percent", "verifier-lenient",
    "verifier-overloaded", "verifier-hangs", "rollouts-aborted", "temperature-high", "clip-higher",
    "other-optimiser", "accumulated", "other-loss",
})  # fmt: skip
"""Those written after rules had been changed for the second part, without the rules at hand."""
PARTS = ("first", "second", "third")


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
        """One of ``PARTS``."""
        return part(self.name)


def part(name: str) -> str:
    """Return the part of a fault or healthy kind, one of ``PARTS``.

    A fault that begins late is in the part of the same fault from step 0: a rule that was tuned on one would otherwise
    be judged on the other.
    """
    plain = name.removesuffix(LATE)
    return "third" if plain in THIRD else "second" if plain in SECOND else "first"


def read_case(folder: Path) -> Case:
    """Return which run a folder holds."""
    return Case(**json.loads((folder / "case.json").read_text(encoding="utf-8"))["case"])
