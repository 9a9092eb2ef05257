"""Install every fault of a trainer into its TRL, without training: python others_fit.py TRAINER.

Run by the Python that has the trainer's TRL.
"""

import sys
from pathlib import Path
from typing import Any

from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.planted import FAULTS
from benchmarks.faults.others.world import World


def world() -> World:
    """A task without a model."""
    return World(
        policy=Path("none"), prompts=["a"], held_out=["b"], mark="\n", reward=lambda ps, rs: [1.0] * len(rs), limit=8,
        batch=8, steps=10, learning_rate={"ppo": 0.1, "grpo": 0.1, "rloo": 0.1}, sign="#", letters=1,
    )  # fmt: skip


def contents(plan: Plan) -> dict[str, Any]:
    """What a fault may have changed in a plan."""
    return {name: value for name, value in vars(plan).items() if name != "_names"}


def fitted(trainer: str) -> list[str]:
    """Install each fault, and return the names of those that changed something."""
    task, changed = world(), []
    for one in FAULTS.values():
        if trainer not in one.trainers:
            continue
        plan = Plan(trainer, task)
        one.plant(plan)
        with plan.installed():
            pass
        if contents(plan) != contents(Plan(trainer, task)):
            changed.append(one.name)
    return changed


if __name__ == "__main__":
    print(*fitted(sys.argv[1]))
