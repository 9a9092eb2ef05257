"""Train the runs of the benchmark of episodes: python -m benchmarks.faults.episodes.trained.generate FOLDER.

Every run is a folder ``NAME--LEVEL--ALGORITHM--episodes--SEED``. What is there already is kept.
"""

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.faults.attempt import attempt
from benchmarks.faults.case import CALIBRATION_SEEDS, EPISODES, Case
from benchmarks.faults.episodes.trained.healthy import HEALTHY
from benchmarks.faults.episodes.trained.planted import FAULTS
from benchmarks.faults.episodes.trained.setup import RUNS, Setup, train, warm_start

HELD_OUT = range(CALIBRATION_SEEDS.stop, CALIBRATION_SEEDS.stop + 5)


def cases(seeds: Sequence[int], only: Sequence[str] = ()) -> Iterator[Case]:
    """Yield the runs of every fault and every healthy kind, or of some; algorithms and severities take turns."""
    algorithms, names = [*RUNS], [*FAULTS, *HEALTHY]
    for name, seed in itertools.product(only or names, seeds):
        turn = names.index(name) + seed
        yield Case(name, turn % 3 if name in FAULTS else -1, algorithms[turn % len(algorithms)], EPISODES, seed)


def planted(case: Case, model: Path) -> Setup:
    """Return a run before it starts, with its fault planted."""
    setup = Setup(case.algorithm, model, case.seed)
    for name in case.faults:
        FAULTS[name].plant(setup, FAULTS[name].levels[case.level])
    if not case.faults:
        HEALTHY[case.name](setup)
    return setup


def make(case: Case, folder: Path, model: Path) -> None:
    """Train one run."""
    torch.set_num_threads(1)
    unfinished = folder / f"{case.folder}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    attempt(unfinished, lambda: train(planted(case, model), unfinished))
    for name in ("checkpoints", "model"):
        shutil.rmtree(unfinished / name, ignore_errors=True)
    (unfinished / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    unfinished.rename(folder / case.folder)


def main() -> None:
    """Train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(HELD_OUT.stop)])
    parser.add_argument(
        "--only",
        nargs="+",
        default=(),
        choices=[*FAULTS, *HEALTHY],
        metavar="NAME",
        help="names of faults or healthy kinds",
    )
    given = parser.parse_args()
    model = warm_start(given.folder)
    for case in cases(given.seeds, given.only):
        if not (given.folder / case.folder).exists():
            started = time.perf_counter()
            make(case, given.folder, model)
            print(f"{case.folder} {time.perf_counter() - started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
