"""How to continue an unfinished run, printed as the next thing to do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cavesson.command_line import command_line
from cavesson.record import open as open_run
from cavesson.registry import ALGORITHMS


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
    info = open_run(folder).info
    if not is_trained_here(info):
        return None
    if info["inputs"]:
        return "Training(..., resume=True) in Python"
    return command_line(info["algorithm"], "--resume", folder, processes=info["processes"])
