"""Command lines that the user can paste into the shell, printed as the next thing to do, such as to continue a run."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS

ON_RAY = "CAVESSON_RAY"
"""A variable that is set in the processes of a run on a Ray cluster, to the namespace of its actors."""
ACCEPT = "--accept-changes"
"""The flag with which a run continues with rewards that have changed."""
STAGE = "CAVESSON_STAGE"
"""A variable that is set in the processes of a stage of `align --ray`, to the name of the stage."""


def command_line(*words: str | Path, processes: int = 1) -> str:
    """Return `cavesson WORDS…` in a form that can be pasted into the shell that started this process."""
    parts = [*program(), *map(str, words), *(["--processes", str(processes)] if processes > 1 else [])]
    return shlex.join(parts) if os.name == "posix" else subprocess.list2cmdline(parts)


def is_trained_here(info: Mapping[str, Any]) -> bool:
    """Return whether a run with this run.json was trained by an algorithm of Cavesson, not by another trainer."""
    return "config" in info and "trainer" not in info and info.get("algorithm") in ALGORITHMS


def continuation(folder: Path) -> str | None:
    """Return the command that continues the run in a folder, or the Python call if there is no such command.

    Returns:
        None if the folder has no run, or one of another trainer.
    """
    if not (folder / "run.json").exists():
        return None
    from cavesson.record import run_info  # most command lines need no record, which is slow to import

    try:
        info = run_info(folder)
    except UserError:
        if (folder / "run.json").exists():
            raise
        return None  # another process of the run has removed it in the meantime
    if not is_trained_here(info):
        return None
    if info["inputs"]:
        return "Training(..., resume=True) in Python"
    if ON_RAY in os.environ:
        return command_line(info["algorithm"], "--resume", folder, "--ray")
    return command_line(info["algorithm"], "--resume", folder, processes=info["processes"])


def with_accepted(way: str) -> str:
    """Return a way to continue a run that also accepts a corrected reward."""
    in_python = "resume=True"
    if in_python in way:
        return way.replace(in_python, f"{in_python}, accept_changes=True")
    return way if ACCEPT in way else f"{way} {ACCEPT}"


def resume_hint(folder: Path) -> str | None:
    """Return the command that continues what this one has begun in a run's folder; `align` continues as it began."""
    way = continuation(folder)
    return command_line(*sys.argv[1:]) if way is not None and sys.argv[1:2] == ["align"] else way


def program() -> list[str]:
    """Return the command `cavesson` of this Python: its name if it is on the PATH, else its path or `python -m`."""
    script = _script()
    if script is None:
        return [sys.executable, "-m", "cavesson"]
    on_path = shutil.which("cavesson")
    if on_path is not None and os.path.samefile(on_path, script):
        return ["cavesson"]
    below = script.is_relative_to(Path.cwd())
    return [str(script.relative_to(Path.cwd()) if below else script)]


def _script() -> Path | None:
    """Return the full path of this Python's script; links are not resolved, because users know their names."""
    called = Path(sys.argv[0]).absolute()
    if called.stem == "cavesson" and called.is_file():
        return called
    beside = shutil.which("cavesson", path=str(Path(sys.executable).parent))
    return None if beside is None else Path(beside)
