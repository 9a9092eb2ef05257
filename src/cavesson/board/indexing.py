"""The process that keeps an index up to date, separate from the server so that neither blocks the other."""

import os
import signal
import time
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import cavesson.record
from cavesson.doctor.findings_file import findings_file
from cavesson.doctor.watch import Watch
from cavesson.errors import UserError, print_exception
from cavesson.index.build import Builder
from cavesson.index.folder import PROBLEM, only_writer
from cavesson.record import Run
from cavesson.record.background import small_process, without_ctrl_c, yield_cpu
from cavesson.record.files import replacing
from cavesson.record.index_folder import fingerprint
from cavesson.record.storage import storage

PAUSE = 0.5
PAUSE_AFTER_PROBLEM = 10.0
"""Seconds between two looks at the record."""

MAX_DIAGNOSED = 2_000_000
"""Rollouts of a run that the doctor looks at unasked: a million take it 20 seconds and a gigabyte of memory."""


def start(path: str, folder: Path) -> BaseProcess:
    """Start a process that adds everything that the run at ``path`` records to the index in ``folder``."""
    process = get_context("spawn").Process(target=_watch, args=(path, folder, os.getpid()), daemon=True)
    with without_ctrl_c():
        process.start()
    return process


def _watch(path: str, folder: Path, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with the board
    yield_cpu(5)  # gives the server priority
    small_process()
    while os.getppid() == parent:
        with only_writer(folder) as mine:
            if mine:
                _guarded(path, folder, parent)
        time.sleep(PAUSE)


def _guarded(path: str, folder: Path, parent: int) -> None:
    """Follow the run; report errors on the page and in the terminal, and wait before the next attempt."""
    problem = folder / PROBLEM
    try:
        problem.unlink(missing_ok=True)
        _follow(path, folder, parent)
    except Exception as error:
        with replacing(problem) as file:
            file.write(f"the index cannot be updated: {error}".encode("utf-8", "backslashreplace"))
        print_exception(error)
        time.sleep(PAUSE_AFTER_PROBLEM)


def _follow(path: str, folder: Path, parent: int) -> None:
    builder: Builder | None = None
    doctor = Watch(path, findings_file(folder))
    while os.getppid() == parent:
        run = _opened(path)
        if run is not None and (builder is None or builder.state.run != fingerprint(run)):
            builder = Builder(run, folder)
        if run is None or builder is None or not (builder.update() or builder.advance()):
            if builder is not None and builder.state.rows <= MAX_DIAGNOSED:
                state = builder.state
                doctor.poll(f"{state.run} {state.metrics_cursor} {state.cursor}")
            time.sleep(PAUSE)


def _opened(path: str) -> Run | None:
    """Return the run as it is now, which may be a different one than before; None if there is no run."""
    try:
        return cavesson.record.open(path)
    except UserError:
        if storage(path).exists("run.json"):
            raise
        return None
