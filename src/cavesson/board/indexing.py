"""The processes that keep indexes up to date, separate from the server so that neither blocks the other."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import cavesson.record
from cavesson.doctor.watch import Watch
from cavesson.errors import UserError, print_exception
from cavesson.findings.stored import findings_file
from cavesson.index.build import Builder
from cavesson.index.folder import PROBLEM, only_writer
from cavesson.process_limits import small_process, without_ctrl_c, yield_cpu
from cavesson.processors import usable_processors
from cavesson.record import Run
from cavesson.record.files import replacing
from cavesson.record.read.index_folder import fingerprint
from cavesson.record.storage import storage

PAUSE = 0.5
PAUSE_AFTER_PROBLEM = 10.0
"""Seconds between two looks at the record."""

MAX_DIAGNOSED = 2_000_000
"""Rollouts of a run that the doctor looks at unasked: a million take it 20 seconds and a gigabyte of memory."""


class Indexing:
    """The processes that add everything that some runs record to their indexes, at most one for each core."""

    def __init__(self, allow_remote: bool = False) -> None:
        self.allow_remote = allow_remote
        self.processes: list[BaseProcess] = []
        self._to: list[Connection] = []
        self._next = 0
        self._lock = threading.Lock()

    def add(self, path: str, folder: Path) -> None:
        """Follow a run, given by its path and its index folder, from now on."""
        with self._lock:
            if len(self._to) < usable_processors():
                self._start()
            self._to[self._next % len(self._to)].send((path, folder))
            self._next += 1

    def _start(self) -> None:
        """Start a process, which gets its runs by a pipe."""
        context = get_context("spawn")
        there, here = context.Pipe(duplex=False)
        process = context.Process(target=_watch, args=(there, os.getpid(), self.allow_remote), daemon=True)
        with without_ctrl_c():
            process.start()
        there.close()
        self.processes.append(process)
        self._to.append(here)


def _watch(runs: Connection, parent: int, allow_remote: bool) -> None:
    """Follow several runs in turns until the board has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with the board
    yield_cpu(5)  # gives the server priority
    small_process()
    doctors: dict[str, Watch] = {}
    due: dict[Iterator[float], float] = {}
    while os.getppid() == parent:
        rest = min(due.values(), default=math.inf) - time.monotonic()
        try:
            while runs.poll(min(max(0.0, rest), PAUSE)):
                path, folder = runs.recv()
                due[_attended(path, folder, doctors, allow_remote)] = rest = 0.0
        except EOFError:
            return  # the board has ended
        follower = min(due, key=due.__getitem__, default=None)
        if follower is not None and due[follower] <= time.monotonic():
            pause = next(follower)
            due[follower] = time.monotonic() + pause


def _attended(path: str, folder: Path, doctors: dict[str, Watch], allow_remote: bool = False) -> Iterator[float]:
    """Follow a run whenever no other process does; yield the seconds until the next look."""
    while True:
        try:
            with only_writer(folder) as mine:
                if mine:
                    yield from _guarded(path, folder, doctors, allow_remote)
            pause = PAUSE
        except OSError as error:
            print_exception(error)
            pause = PAUSE_AFTER_PROBLEM
        yield pause


def _guarded(path: str, folder: Path, doctors: dict[str, Watch], allow_remote: bool) -> Iterator[float]:
    """Follow the run; report errors on the page and in the terminal, and wait before the next attempt."""
    problem = folder / PROBLEM
    try:
        problem.unlink(missing_ok=True)
        yield from _follow(path, folder, doctors, allow_remote)
    except Exception as error:
        with suppress(OSError), replacing(problem) as file:  # the disk may be full
            file.write(f"the index cannot be updated: {error}".encode("utf-8", "backslashreplace"))
        print_exception(error)
        yield PAUSE_AFTER_PROBLEM


def _follow(path: str, folder: Path, doctors: dict[str, Watch], allow_remote: bool = False) -> Iterator[float]:
    """Index what the run records, piece by piece; of the runs of a process, one at a time is diagnosed."""
    builder: Builder | None = None
    doctor = doctors[path] = Watch(path, findings_file(folder))
    while True:
        run = _opened(path, allow_remote)
        if run is not None and (builder is None or builder.state.run != fingerprint(run)):
            builder = Builder(run, folder)
            doctor.run = run.folder
        if run is not None and builder is not None and (builder.update() or builder.advance()):
            yield 0.0
            continue
        if builder is not None and builder.state.rows <= MAX_DIAGNOSED:
            state = builder.state
            alone = not any(other.running for other in doctors.values())
            doctor.poll(f"{state.run} {state.metrics_cursor} {state.cursor}", start=alone)
        yield PAUSE


def _opened(path: str, allow_remote: bool) -> Run | None:
    """Return the run as it is now, which may be a different one than before; None if there is no run."""
    try:
        return cavesson.record.open(path, allow_remote)
    except UserError:
        if not storage(path).exists("run.json"):
            return None
        return cavesson.record.open(path, allow_remote)  # the folder may have been moved back just now
