"""Trains the runs: python -m benchmarks.faults.others.generate --couplets tang-couplets.jsonl --out build/others.

Every run is a folder ``NAME--TRAINER--TASK--SEED``. What is there already is kept, so that the command can be stopped
and started again. PPO needs TRL 1.10 in a separate environment, with Cavesson's dependencies.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.others import couplets, smol
from benchmarks.faults.others.case import PARTS, TASKS, TRAINERS, Case
from benchmarks.faults.others.healthy import HEALTHY
from benchmarks.faults.others.planted import FAULTS

ROOT = Path(__file__).parents[3]
OLD = ROOT / "build" / "trl" / "bin" / "python"
"""Has TRL 1.10."""
SEEDS = 3
SMOL = ("penalty-flipped", "reward-early", "end-forbidden", "siblings-alike", "reference-synchronised", "likes-sign")
"""The faults that a short run of SmolLM2 can show."""


def cases() -> Iterator[Case]:
    """Yield all runs, seed by seed.

    With each seed a fault is planted in another of its trainers; a healthy kind is trained by all of them. SmolLM2
    comes last.
    """
    for seed in range(SEEDS):
        for turn, (name, fault) in enumerate(FAULTS.items()):
            yield Case(name, False, fault.trainers[(turn + seed) % len(fault.trainers)], "couplets", seed)
        yield from (Case(name, True, trainer, "couplets", seed) for name in HEALTHY for trainer in TRAINERS)
    for seed in range(SEEDS):
        for turn, name in enumerate(SMOL):
            trainers = FAULTS[name].trainers
            yield Case(name, False, trainers[(turn + seed) % len(trainers)], "smol", seed)
        yield from (Case("usual", True, trainer, "smol", seed) for trainer in TRAINERS)


def make_bases(out: Path, tasks: set[str], data: Path | None) -> None:
    """Make the models of the tasks that are not there yet."""
    for task in sorted(tasks):
        folder = out / f"base-{task}"
        if folder.exists():
            continue
        unfinished = folder.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        if task == "smol":
            smol.make(unfinished)
        elif data is None:
            sys.exit("the couplets are needed to make their model: --couplets FILE")
        else:
            couplets.make(unfinished, data)
        unfinished.rename(folder)


def train(case: Case, out: Path, old: Path) -> float:
    """Train one run in a separate process and return the seconds it took."""
    shutil.rmtree(out / f"{case.folder}.part", ignore_errors=True)
    python = old if case.trainer == "ppo" else Path(sys.executable)
    given = [case.name, case.trainer, case.task, str(case.seed), str(out)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    started = time.perf_counter()
    with (out / f"{case.folder}.log").open("w", encoding="utf-8") as log:
        command = [str(python), "-m", "benchmarks.faults.others.run", *given]
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return time.perf_counter() - started


def main() -> None:
    """Read the arguments and train what is missing, one run at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--couplets", type=Path, help="JSON lines with couplet and next")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--trainer", choices=TRAINERS)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many of the seeds")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--trl-python", type=Path, default=OLD, help="of an environment with TRL 1.10")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    only = [name for name in given.only.split(",") if name]
    wanted = [
        case
        for case in cases()
        if given.part in ("all", case.part)
        and given.trainer in (None, case.trainer)
        and given.task in (None, case.task)
        and case.seed < given.seeds
        and (not only or case.name in only)
        and not (given.out / case.folder).exists()
    ]
    if any(case.trainer == "ppo" for case in wanted) and not given.trl_python.exists():
        sys.exit(f"PPO needs an environment with TRL 1.10, and {given.trl_python} is not there: --trl-python PYTHON")
    make_bases(given.out, {case.task for case in wanted}, given.couplets)
    print(f"{len(wanted)} runs to train", file=sys.stderr)
    for number, case in enumerate(wanted, 1):
        seconds = train(case, given.out, given.trl_python)
        how = "" if (given.out / case.folder).exists() else f", failed: see {case.folder}.log"
        print(f"{number}/{len(wanted)} {case.folder} {seconds:.0f} s{how}", flush=True)


if __name__ == "__main__":
    main()
