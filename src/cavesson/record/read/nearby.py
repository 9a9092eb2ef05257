"""Name the runs near a path that is not one, so that a mistyped name is noticed."""

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path

MAX_LOOKED_AT = 2_000
"""Folders that are looked at: a mistyped path may begin in a large one."""
MAX_NAMED = 3


def runs_nearby(path: Path) -> str:
    """Return ``did you mean …?`` or ``runs nearby: …`` for a path that is not a run; "" without any."""
    folders = [folder for folder in (path, *path.parents) if os.path.isdir(folder)]
    runs = next(filter(None, map(_runs_in, folders[:2])), {})
    near = difflib.get_close_matches(path.name, runs.values(), n=MAX_NAMED)
    if near:
        alike = sorted((run for run in runs if runs[run] in near), key=lambda run: near.index(runs[run]))
        return f"did you mean {' or '.join(alike[:MAX_NAMED])}?"
    named = sorted(runs)
    more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
    return f"runs nearby: {', '.join(named[:MAX_NAMED])}{more}" if named else ""


def _runs_in(folder: Path) -> dict[str, str]:
    """Return the path and the name of each run that the folder is, that is in it, or in a folder there."""
    inside = list(islice(_folders([folder]), MAX_LOOKED_AT))
    below = islice(_folders(inside), MAX_LOOKED_AT)
    return {str(one): one.name for one in chain([folder], inside, below) if os.path.isfile(one / "run.json")}


def _folders(parents: Iterable[Path]) -> Iterator[Path]:
    for parent in parents:
        with suppress(OSError):  # a folder of somebody else
            yield from (child for child in parent.iterdir() if child.is_dir())
