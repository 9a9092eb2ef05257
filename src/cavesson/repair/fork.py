"""Forks of a run: folders that continue it from a step, perhaps with other settings."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cavesson.errors import UserError
from cavesson.handlers import ending_with_parent, handling
from cavesson.record import run_info
from cavesson.record.read.reader import ELSEWHERE
from cavesson.record.run_folder import rewrite_run
from cavesson.record.storage import reaching, storage
from cavesson.repair.plan import Plan, with_settings
from cavesson.train.checkpoint import between_steps, place_of
from cavesson.train.matmul import product_files
from cavesson.train.resuming import without_end


def fork(run: Path, target: Path, plan: Plan, settings: dict[str, Any]) -> None:
    """Make a folder that resumes a run at the start of a plan with some settings changed; the run stays as it is."""
    unfinished = target.with_name(f".{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    if plan.start:
        _copy_checkpoint(place_of(run, plan.start), place_of(unfinished, plan.start))
        if plan.keeps_record:
            _copy_record(run, unfinished)
    for file in product_files(run):
        shutil.copy(file, unfinished)
    info = {name: value for name, value in run_info(run).items() if name != ELSEWHERE}
    config = with_settings(run, target, settings, plan.end)
    origin = {"run": str(run.absolute()), "step": plan.start, "settings": settings}
    rewrite_run(unfinished, info | {"config": config, "steps": config["steps"], "fork": origin})
    unfinished.rename(target)


def _copy_checkpoint(source: Path, copy: Path) -> None:
    try:
        shutil.copytree(source, copy)
    except shutil.Error as error:
        file, _, reason = error.args[0][0]
        raise UserError(f"{file} cannot be copied into the fork: {reason}") from error


def _copy_record(run: Path, target: Path) -> None:
    """Copy the whole record; of its steps, a resumed run hides those that it does again."""
    source, copy = storage(run_info(run).get(ELSEWHERE) or run), storage(target)
    folders = ("record", "compactions", "attempts")
    with reaching(source):
        names = [f"{folder}/{name}" for folder in folders for name in source.names(folder)]
        for name in (*names, "vocabulary.parquet"):
            with copy.writing(name) as file:
                file.write(source.read(name))


def is_done(folder: Path, end: int) -> bool:
    """Return whether a fork has been trained up to step `end`."""
    return max(between_steps(folder), default=0) >= end


@contextmanager
def ending(folder: Path, end: int) -> Iterator[None]:
    """Let a fork that is trained inside this block end before step `end`, while its schedules go over all its steps.

    After an error, it still ends there when it is resumed. Otherwise it is then a run like others.
    """
    info = run_info(folder)
    steps = max(end, info["steps"])
    info |= {"config": info["config"] | {"steps": steps}, "steps": steps}
    rewrite_run(folder, info | {"fork": info["fork"] | {"end": end}})
    yield
    rewrite_run(folder, without_end(run_info(folder)))


def resume(folder: Path) -> None:
    """Resume a fork as the command line does, in as many processes as the run had.

    Raises:
        UserError: it was stopped or has failed, and has printed why.
    """
    info = run_info(folder)
    command = [sys.executable, "-m", "cavesson", info["algorithm"], "--resume", str(folder)]
    command += ["--processes", str(info["processes"])] if info["processes"] > 1 else []
    # Standard output is for the result. In its own session, a fork gets Ctrl-C from here only, and once.
    process = subprocess.Popen(ending_with_parent(command), stdout=2, start_new_session=True)
    with handling(lambda number, frame: process.send_signal(number), signal.SIGINT, signal.SIGTERM):
        code = process.wait()
    if code:
        error = UserError(f"the fork {folder} has not ended; repeat the command to resume it")
        error.exit_code = code if code > 0 else 128 - code
        raise error
