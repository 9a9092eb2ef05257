"""Merge a recorder's small segments in a low-priority thread."""

import os
import sys
from collections.abc import Callable
from threading import Condition, Thread

from cavesson.record.maintain.compaction import compact
from cavesson.record.storage import Storage


class _Stopped(Exception):
    """Raised to stop a merge before it is done."""


class Merger:
    """Merges the segments that one process has written, on request and one merge at a time.

    ``failed`` is called with the exception if a merge fails; the next request tries again.
    """

    def __init__(self, files: Storage, rank: int, failed: Callable[[BaseException], None]) -> None:
        self._files = files
        self._rank = rank
        self._failed = failed
        self._changed = Condition()
        self._before: tuple[int, int] | None = None
        self._stopped = False
        self._thread: Thread | None = None

    def merge(self, before: tuple[int, int]) -> None:
        """Request a merge of everything before (attempt, step) without waiting; the latest request counts."""
        with self._changed:
            self._before = before
            self._changed.notify()
        if self._thread is None:
            self._thread = Thread(target=self._work, name="merger", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the thread; an unfinished merge is abandoned, and the next one deletes its partial files."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, 0, 19)  # on Linux, this affects only the current thread
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._before is not None)
                before, self._before = self._before, None
            try:
                self._go_on()
                compact(self._files, self._rank, before, go_on=self._go_on)
            except _Stopped:
                return
            except BaseException as error:
                self._failed(error)

    def _go_on(self) -> None:
        if self._stopped:
            raise _Stopped
