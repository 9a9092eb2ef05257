"""A recorder's merging of small segments, in a thread that gives way to everything else."""

import os
import sys
from collections.abc import Callable
from threading import Condition, Thread

from cavesson.record.compaction import compact
from cavesson.record.storage import Storage


class _Stopped(Exception):
    """The merging ends before it is done."""


class Merger:
    """Merges what one process has written when it is told to, one merging at a time.

    Args:
        files: The run.
        rank: Number of the process.
        failed: Is told of an exception in the thread, which then ends.
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
        """Asks for all that is before (attempt, step) to be merged, and does not wait; the latest call counts."""
        with self._changed:
            self._before = before
            self._changed.notify()
        if self._thread is None:
            self._thread = Thread(target=self._work, name="merger", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; a merging that is not done is given up, and what it wrote so far deleted by the next one."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, 0, 19)  # on Linux that is this thread alone
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._before is not None)
                    before, self._before = self._before, None
                self._go_on()
                compact(self._files, self._rank, before, go_on=self._go_on)
        except _Stopped:
            return
        except BaseException as error:
            self._failed(error)

    def _go_on(self) -> None:
        if self._stopped:
            raise _Stopped
