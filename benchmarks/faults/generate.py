"""Trains the runs of the benchmark: python -m benchmarks.faults.generate FOLDER.

Every run is a folder ``NAME--LEVEL--ALGORITHM--SIZE--SEED``. What is there already is kept, so that the command can be
stopped and started again.
"""

import argparse
import itertools
import json
import shutil
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple


class Case(NamedTuple):
    """One run."""

    name: str
    """of the fault, or of a healthy kind of run"""
    level: int
    """0 to 2; −1 for a healthy one"""
    algorithm: str
    size: str
    seed: int

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"{self.name}--{self.level}--{self.algorithm}--{self.size}--{self.seed}"


def cases(seeds: int, sizes: list[str]) -> Iterator[Case]:
    """Yields all runs: every fault at three levels, every healthy kind, for each algorithm and seed."""
    from benchmarks.faults.fault import ONLINE
    from benchmarks.faults.healthy import HEALTHY
    from benchmarks.faults.planted import FAULTS

    for size, seed in itertools.product(sizes, range(seeds)):
        for name, fault in FAULTS.items():
            # Each seed takes one of the algorithms in turn, so that all of them meet all levels.
            for level in range(3):
                algorithm = fault.algorithms[(seed + level) % len(fault.algorithms)]
                yield Case(name, level, algorithm, size, seed)
        for name, algorithm in itertools.product(HEALTHY, ONLINE):
            yield Case(name, -1, algorithm, size, seed)


def make(case: Case, folder: Path) -> float:
    """Trains one run and returns the seconds it took; what went wrong stands in ``failed.txt`` of its folder."""
    import torch

    from benchmarks.faults.healthy import HEALTHY
    from benchmarks.faults.planted import FAULTS
    from benchmarks.faults.setup import Setup, train

    torch.set_num_threads(1)
    started = time.perf_counter()
    setup = Setup(case.algorithm, case.size, case.seed)
    if case.level < 0:
        HEALTHY[case.name](setup)
    else:
        fault = FAULTS[case.name]
        fault.plant(setup, fault.levels[case.level])
    unfinished = folder / f"{case.folder}.part"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        train(setup, folder, unfinished)
    except Exception:
        # A fault may end a run early: its record up to there is what a user would have.
        unfinished.mkdir(exist_ok=True)
        (unfinished / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
    (unfinished / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    unfinished.rename(folder / case.folder)
    return time.perf_counter() - started


def main() -> None:
    """Read the arguments and train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sizes", default="small,other")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--levels", default="-1,0,1,2")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    from benchmarks.faults import world

    given.folder.mkdir(parents=True, exist_ok=True)
    for size in given.sizes.split(","):
        world.base(given.folder, size)
    levels, only = [int(level) for level in given.levels.split(",")], [n for n in given.only.split(",") if n]
    wanted = [
        case
        for case in cases(given.seeds, given.sizes.split(","))
        if case.level in levels and (not only or case.name in only) and not (given.folder / case.folder).exists()
    ]
    print(f"{len(wanted)} runs to train", file=sys.stderr)
    with ProcessPoolExecutor(given.processes) as pool:
        futures = {pool.submit(make, case, given.folder): case for case in wanted}
        for number, future in enumerate(as_completed(futures), 1):
            print(f"{number}/{len(wanted)} {futures[future].folder} {future.result():.1f} s", flush=True)


if __name__ == "__main__":
    main()
