"""Train the runs of the small trainers: python -m benchmarks.faults.small.generate FOLDER --tasks sums sentences.

Every run is a folder ``NAME--TRAINER--TASK--SEED`` with three records. What is there already is kept.
"""

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.faults.attempt import attempt
from benchmarks.faults.small.case import Case
from benchmarks.faults.small.healthy import HEALTHY
from benchmarks.faults.small.plan import TRAINERS, Plan
from benchmarks.faults.small.planted import FAULTS
from benchmarks.faults.small.tasks import DEVELOPMENT, TASKS


def cases(tasks: Sequence[str], seeds: Sequence[int], only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the runs of every fault and every healthy kind, or of some, on some tasks; trainers take turns."""
    names = [*HEALTHY, *FAULTS]
    for seed, name, task in itertools.product(seeds, only or names, tasks):
        trainers = FAULTS[name].trainers if name in FAULTS else TRAINERS
        turn = names.index(name) + [*TASKS].index(task) + seed
        yield Case(name, name in HEALTHY, trainers[turn % len(trainers)], task, seed)


def planted(case: Case) -> Plan:
    """Return a run before it starts, with its fault planted."""
    plan = Plan(case.trainer, case.task, case.seed)
    if case.healthy:
        HEALTHY[case.name](plan)
    else:
        FAULTS[case.name].plant(plan)
    return plan


def make(case: Case, folder: Path) -> None:
    """Train one run."""
    unfinished = folder / f"{case.folder}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    attempt(unfinished, lambda: planted(case).train(unfinished, folder / "starts"))
    (unfinished / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    unfinished.rename(folder / case.folder)


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS], default=DEVELOPMENT)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", default=(), choices=[*HEALTHY, *FAULTS], metavar="NAME")
    given = parser.parse_args()
    for case in cases(given.tasks, given.seeds, given.only):
        if not (given.folder / case.folder).exists():
            started = time.perf_counter()
            make(case, given.folder)
            print(f"{case.folder} {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
