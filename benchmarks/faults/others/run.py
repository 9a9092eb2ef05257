"""Trains one run: python -m benchmarks.faults.others.run NAME TRAINER TASK SEED FOLDER.

``generate`` calls it with the Python that has the right TRL.
"""

import json
import sys
import time
import traceback
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import set_seed

from benchmarks.faults.others import couplets, smol
from benchmarks.faults.others.case import Case
from benchmarks.faults.others.healthy import HEALTHY
from benchmarks.faults.others.plan import Plan
from benchmarks.faults.others.planted import FAULTS
from benchmarks.faults.others.recordings import record_board, record_completions
from benchmarks.faults.others.trainers import built
from benchmarks.faults.others.world import World
from cavesson.integrations.trl import record

WORLDS = {"couplets": couplets.world, "smol": smol.world}


def planned(case: Case, world: World) -> Plan:
    """Return the run before it starts, with its fault planted."""
    if case.healthy:
        plan = Plan(case.trainer, world)
        HEALTHY[case.name](plan)
        return plan
    fault = FAULTS[case.name]
    plan = Plan(case.trainer, world, fault.onset_in(world.steps))
    fault.plant(plan)
    return plan


def train(plan: Plan, case: Case, folder: Path) -> None:
    """Train a run and record it in three ways under ``folder``."""
    set_seed(case.seed)
    record_board(plan, folder / "board")
    record_completions(plan, folder / "completions")
    with plan.installed():
        trainer = built(plan, folder, case.seed)
        record(trainer, folder / "recorder")
        for action in plan.built:
            action(trainer)
        trainer.train()


def main(name: str, trainer: str, task: str, seed: str, place: str) -> None:
    """Train one run; what ended it early stands in ``failed.txt``."""
    torch.set_num_threads(1)
    base = Path(place)
    case = Case(name, name in HEALTHY, trainer, task, int(seed))
    unfinished = base / f"{case.folder}.part"
    started = time.perf_counter()
    plan = planned(case, WORLDS[task](base / f"base-{task}"))
    try:
        train(plan, case, unfinished)
    except RuntimeError:
        # A fault may end a run: what was recorded up to there is what a user would have.
        (unfinished / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
    seconds = time.perf_counter() - started
    about = {"case": case._asdict(), "onset": plan.onset, "seconds": seconds, "trl": version("trl")}
    (unfinished / "case.json").write_text(json.dumps(about), encoding="utf-8")
    unfinished.rename(base / case.folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
