"""Caches the response to the first request of the page, so that it is available before the runs are open.

Importing what is needed to open a run takes most of a second. As long as no file of the runs has been added, removed or
changed, the first request of the page gets the same response as the last time.
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
SETTLED = 2.0
"""Seconds after which another change would be seen in a file's time."""


class Opening:
    """The cached first response of a board of some local runs.

    Args:
        paths: Run folders, as given on the command line.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavesson" / "opening"
        self.folders = [Path(path).absolute() for path in paths]
        names = "\n".join(map(str, self.folders)).encode("utf-8", "surrogateescape")
        self.file = cache / f"{hashlib.sha256(names).hexdigest()[:16]}.json"
        self.stamp = self._stamp()

    def is_kept(self) -> bool:
        """Return whether a valid response is cached, so that the page needs nothing else at first."""
        with suppress(OSError, ValueError), self.file.open("rb") as file:
            head = json.loads(file.readline())
            return self.stamp is not None and isinstance(head, list) and head[1:] == [self.stamp]
        return False

    def answer(self, query: bytes) -> bytes | None:
        """Return the response to a request if it is the cached one and still valid."""
        with suppress(OSError, ValueError):
            head, _, body = self.file.read_bytes().partition(b"\n")
            if self.stamp and json.loads(head) == self._head(query) and self._stamp() == self.stamp:
                return body
        return None

    def keep(self, query: bytes, body: bytes) -> None:
        """Cache a response for the next start, if its runs are complete and nothing is being written or has changed."""
        if self.stamp is None or not _is_final(json.loads(body)) or self._stamp() != self.stamp:
            return
        from cavesson.record.files import replacing  # imports pyarrow, which the first response must not wait for

        with suppress(OSError), replacing(self.file) as file:
            file.write(json.dumps(self._head(query)).encode() + b"\n" + body)

    def _head(self, query: bytes) -> list[Any]:
        return [query.decode("latin-1"), self.stamp]

    def _stamp(self) -> list[Any] | None:
        """Return a value that changes with the runs or the board; None while they change, or if a run is missing."""
        files = [STATIC / "board.js", *(folder / name for folder in self.folders for name in CHANGING)]
        times = [_changed(file) for file in files]
        is_run = all((folder / "run.json").is_file() for folder in self.folders)
        return times if is_run and max(times) < (time.time() - SETTLED) * 1e9 else None


def _changed(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _is_final(answers: list[dict[str, Any]]) -> bool:
    """Return whether the responses contain runs, and none of them is being trained or indexed."""
    first = answers[0].get("answer") if answers else None
    runs = first if isinstance(first, list) else []
    good = all(answer["status"] == 200 for answer in answers)
    return good and len(runs) > 0 and all(run.get("indexed") == 1 and not run.get("live") for run in runs)
