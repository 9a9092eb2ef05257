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
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import Process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Thread
from typing import cast

import torch

from benchmarks.faults import smol, world
from benchmarks.faults.attempt import attempt
from benchmarks.faults.case import Case
from benchmarks.faults.fault import ONLINE
from benchmarks.faults.healthy import HEALTHY
from benchmarks.faults.planted import FAULTS, LATE, PAIRS
from benchmarks.faults.setup import Setup, train
from cavesson.errors import SignalledError

LATE_STEPS = 48
"""Number of steps of a run in the middle of which a fault begins."""
BEFORE = {"verifier-fails": "easy-curriculum"}
"""What a run is until its fault begins, where it is not the usual one: a verifier has few different rewards."""


def cases(seeds: int) -> Iterator[Case]:
    """Yield all runs, seed by seed, so that those made so far say something of all faults.

    Every fault at three levels and every healthy kind of run on each seed, the algorithms taking turns; after the
    second seed the pairs of faults and another size of model with one run per fault, then a third size and
    SmolLM2, at the end the faults that begin in the middle of a run.
    """
    for seed in range(seeds):
        for (turn, (name, fault)), level in itertools.product(enumerate(FAULTS.items()), range(3)):
            yield Case(name, level, fault.algorithms[(turn + seed + level) % len(fault.algorithms)], "small", seed)
        yield from (Case(name, -1, algorithm, "small", seed) for name, algorithm in itertools.product(HEALTHY, ONLINE))
        if seed == 1:
            yield from _pairs()
            yield from _sized("other")
    yield from _sized("large", turned=1)
    yield from smol.cases()
    yield from (case for seed in range(seeds) for case in _late(seed))


def _late(seed: int) -> Iterator[Case]:
    """Yield the runs of a seed in which a fault begins in the middle, not always at the same step."""
    for turn, name in enumerate(LATE):
        algorithms = FAULTS[name].algorithms
        onset = LATE_STEPS // 2 - 4 + (5 * turn + 2 * seed) % 9
        yield Case(name, 1 + (turn + seed) % 2, algorithms[(turn + seed) % len(algorithms)], "small", seed, onset)


def _pairs() -> Iterator[Case]:
    for turn, (one, other) in enumerate(PAIRS):
        shared = [name for name in FAULTS[one].algorithms if name in FAULTS[other].algorithms]
        yield Case(f"{one}+{other}", 1, shared[turn % len(shared)], "small", turn)


def _sized(size: str, turned: int = 0) -> Iterator[Case]:
    """Yield the runs of a size; turned by one, a fault has another level and, of three, another algorithm."""
    seed = world.SIZES[size].seed
    for turn, (name, fault) in enumerate(FAULTS.items()):
        algorithm = fault.algorithms[(turn + 2 * turned) % len(fault.algorithms)]
        yield Case(name, (turn + turned) % 3, algorithm, size, seed)
    yield from (Case(name, -1, algorithm, size, seed) for name, algorithm in itertools.product(HEALTHY, ONLINE))


def base(folder: Path, size: str) -> Path:
    """Return the folder of a base model, which is made when it is not there yet."""
    return smol.base(folder) if size == smol.SIZE else world.base(folder, size)


def planted(case: Case, folder: Path) -> Setup:
    """Return the run before it starts, with everything planted; the base models are in ``folder``."""
    place = base(folder, case.size)
    made = smol.setup if case.size == smol.SIZE else Setup
    setup = made(case.algorithm, place, case.seed)
    for name in case.faults:
        FAULTS[name].plant(setup, FAULTS[name].levels[case.level])
    if case.onset:
        setup.steps = LATE_STEPS
        setup.before = Setup(case.algorithm, place, case.seed, case.onset, setup.settings)
        HEALTHY[BEFORE.get(case.name, "usual")](setup.before)
    if not case.faults:
        HEALTHY[case.name](setup)
    return setup


def make(case: Case, folder: Path) -> None:
    """Train one run and print the seconds it took; what went wrong stands in ``failed.txt`` of its folder."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    unfinished = folder / f"{case.folder}.part"
    stood_still = True
    while stood_still:
        shutil.rmtree(unfinished, ignore_errors=True)
        with still() as stills:
            attempt(unfinished, lambda: train(planted(case, folder), unfinished))
        stood_still = bool(stills)
    (unfinished / "case.json").write_text(json.dumps(case._asdict()), encoding="utf-8")
    unfinished.rename(folder / case.folder)
    print(f"{case.folder} {time.perf_counter() - started:.1f} s", flush=True)


@contextmanager
def still(most: float = 3.0) -> Iterator[list[float]]:
    """Collect the times for which the whole machine stood still: no fault of a run that was going on."""
    found: list[float] = []
    ended = Event()

    def watch() -> None:
        now = time.perf_counter()
        while not ended.wait(0.2):
            before, now = now, time.perf_counter()
            if now - before > most:
                found.append(now - before)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def make_all(wanted: list[Case], folder: Path, processes: int) -> None:
    """Train several runs at a time, each in its own process; an interrupt ends them all.

    A pool would not do: an interrupted worker can leave with the lock of its queue, for which all others then wait.
    """
    waiting, made = iter(wanted), 0
    running: dict[int, Process] = {}
    try:
        while made < len(wanted):
            for case in islice(waiting, processes - len(running)):
                process = Process(target=make, args=(case, folder), name=case.folder)
                process.start()
                running[process.sentinel] = process
            for sentinel in wait(list(running)):
                process = running.pop(cast(int, sentinel))
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{process.name} was not made")
                made += 1
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.join()


def main() -> None:
    """Read the arguments and train what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="names of faults, healthy kinds or folders, separated by commas")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    only = {name for name in given.only.split(",") if name}
    wanted = [
        case
        for case in cases(given.seeds)
        if (not only or {case.name, case.folder} & only) and not (given.folder / case.folder).exists()
    ]
    if any(case.size == smol.SIZE for case in wanted) and not smol.installed():
        print(f"the runs of SmolLM2 are left out; they need {smol.INSTALL}", file=sys.stderr)
        wanted = [case for case in wanted if case.size != smol.SIZE]
    for size in sorted({case.size for case in wanted}):
        base(given.folder, size)
    print(f"{len(wanted)} runs to train", file=sys.stderr)
    try:
        make_all(wanted, given.folder, given.processes)
    except (KeyboardInterrupt, SignalledError):
        sys.exit("stopped; the same command trains the rest")


if __name__ == "__main__":
    main()
