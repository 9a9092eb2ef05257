"""Caches the responses to the first requests of the page, so that they are available before the runs are open.

Importing what is needed to open a run takes most of a second. As long as no file of the runs has been added, removed or
changed, the first requests of the page get the same responses as the last time.
"""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cavesson.board.page import STATIC

CHANGING = ("run.json", "attempts", "record", "compactions", "index/state.json")
"""What changes with a run: folders do when files come or go, and no file of a record is ever written twice."""
RUNS = "/api/runs"
"""Path of the request whose response tells whether the runs are complete."""
SETTLED = 2.0
"""Seconds after which another change would be seen in a file's time."""


class Opening:
    """The cached first responses of a board of some local runs, given by their folders as on the command line."""

    def __init__(self, paths: Sequence[str]) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavesson" / "opening"
        self.folders = [Path(path).absolute() for path in paths]
        names = "\n".join(map(str, self.folders)).encode("utf-8", "surrogateescape")
        self.file = cache / f"{hashlib.sha256(names).hexdigest()[:16]}.json"
        self.stamp = self._stamp()
        self._kept = self._read()
        self._new: dict[str, tuple[str, str]] = {}

    def is_kept(self) -> bool:
        """Return whether there are valid cached responses, so that the page needs nothing else at first."""
        return bool(self._kept)

    def answer(self, path: str, query: str) -> bytes | None:
        """Return the response to the first request for a path if it is cached and still valid."""
        known, body = self._kept.pop(path, (None, ""))
        return body.encode() if known == query and self._stamp() == self.stamp else None

    def keep(self, path: str, query: str, body: bytes) -> None:
        """Cache the first response of a path for the next start, if nothing is being written or has changed."""
        if self.stamp is None or path in self._new or self._stamp() != self.stamp:
            return
        self._new[path] = (query, body.decode())
        if RUNS not in self._new or not _is_final(json.loads(self._new[RUNS][1])):
            return
        from cavesson.record.files import write_text  # imports pyarrow, which the first response must not wait for

        with suppress(OSError):
            write_text(self.file, json.dumps([self.stamp, self._new]))

    def _read(self) -> dict[str, tuple[str, str]]:
        with suppress(OSError, ValueError):
            stamp, kept = json.loads(self.file.read_bytes())
            return kept if self.stamp is not None and stamp == self.stamp else {}
        return {}

    def _stamp(self) -> list[Any] | None:
        """Return a value that changes with the runs or the board; None while they change, or if a run is missing."""
        files = [STATIC / "board.js", *(folder / name for folder in self.folders for name in CHANGING)]
        times = [changed(file) for file in files]
        # A run without this folder has its record elsewhere, or none yet.
        is_run = all((folder / "run.json").is_file() and (folder / "record").is_dir() for folder in self.folders)
        return times if is_run and max(times) < (time.time() - SETTLED) * 1e9 else None


def changed(file: Path) -> int:
    """Return when a file was last changed, in nanoseconds since 1970; 0 if it is not there."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _is_final(runs: list[dict[str, Any]]) -> bool:
    """Return whether there are runs, and none of them is being trained or indexed."""
    return len(runs) > 0 and all(run.get("indexed") == 1 and not run.get("live") for run in runs)
