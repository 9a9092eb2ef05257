"""Finds the runs in folders, without opening them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

DEPTH = 3
"""Levels of folders below one that are looked through; what is in a run folder is part of the run."""
MAX_LOOKED_AT = 20_000
"""Folders."""
OF_RUNS = {"run.json", "record"}
"""What tells a run folder, also a broken one, from others."""


def is_folder_of_runs(path: str) -> bool:
    """Return whether a path is a folder on this machine that has runs in it, or is empty, and is not a run itself."""
    if "://" in path or not os.path.isdir(path) or any(Path(path, name).exists() for name in OF_RUNS):
        return False
    return not os.listdir(path) or bool(run_folders(Path(path)))


def run_folders(root: Path) -> list[Path]:
    """Return the run folders below a folder, by name; those that cannot be read have none."""
    return sorted(_below(root, DEPTH, [MAX_LOOKED_AT]))


def _below(folder: Path, depth: int, left: list[int]) -> Iterator[Path]:
    inside: list[Path] = []
    with suppress(OSError), os.scandir(folder) as entries:
        inside = [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    for one in inside:
        left[0] -= 1
        if left[0] < 0:
            return
        if any((one / name).exists() for name in OF_RUNS):
            yield one
        elif depth > 1:
            yield from _below(one, depth - 1, left)
