"""What the page asks for first, kept from the last time: it is there before the runs are open.

Importing what opens a run takes most of a second. As long as no file of the runs has come, gone or changed, the page's
first request has the answer that it had the last time.
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
    """The first answer of a board of some local runs.

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
        """Returns whether an answer is kept that still holds, so that the page needs nothing else at first."""
        with suppress(OSError, ValueError), self.file.open("rb") as file:
            head = json.loads(file.readline())
            return self.stamp is not None and isinstance(head, list) and head[1:] == [self.stamp]
        return False

    def answer(self, query: bytes) -> bytes | None:
        """Returns the answer to a request, if it is the one that is kept and still holds."""
        with suppress(OSError, ValueError):
            head, _, body = self.file.read_bytes().partition(b"\n")
            if self.stamp and json.loads(head) == self._head(query) and self._stamp() == self.stamp:
                return body
        return None

    def keep(self, query: bytes, body: bytes) -> None:
        """Keeps an answer for the next start, if it tells of whole runs that nobody writes and nothing has changed."""
        if self.stamp is None or not _is_final(json.loads(body)) or self._stamp() != self.stamp:
            return
        from cavesson.record.files import replacing  # with pyarrow, for which the first answer need not wait

        with suppress(OSError), replacing(self.file) as file:
            file.write(json.dumps(self._head(query)).encode() + b"\n" + body)

    def _head(self, query: bytes) -> list[Any]:
        return [query.decode("latin-1"), self.stamp]

    def _stamp(self) -> list[Any] | None:
        """Returns what changes when the runs or the board do; None while they change, or where there is none."""
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
    """Whether these are the runs and more, and no run is being trained or indexed."""
    first = answers[0].get("answer") if answers else None
    runs = first if isinstance(first, list) else []
    good = all(answer["status"] == 200 for answer in answers)
    return good and len(runs) > 0 and all(run.get("indexed") == 1 and not run.get("live") for run in runs)
