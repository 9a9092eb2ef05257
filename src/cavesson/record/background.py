"""Keeps the board's processes small."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from cavesson.record.arrow import without_pandas

# Names of malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
ARENAS = 2
LARGE = 1 << 20
"""Bytes of a piece of memory that goes back to the system as soon as it is free."""
REUSED = 32 << 20
"""The same where answers must come fast: a column of a million rows is written to fresh memory in 1.6 ms, and in 0.2 ms
to memory that was used before."""


def small_process(large: int = LARGE) -> None:
    """Spares memory, and a third of a second at the start.

    pyarrow looks for no pandas. And memory that is free goes back to the system: a server's threads would each keep a
    heap of their own otherwise.

    Args:
        large: Bytes of a piece of memory that goes back at once.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, large)
        mallopt(M_TRIM_THRESHOLD, 2 * large)
    without_pandas()


def yield_cpu(niceness: int) -> None:
    """Let other processes of the machine go first; Windows has no such numbers, and there nothing changes."""
    if sys.platform != "win32":
        os.nice(niceness)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Processes that are started in this block never get Ctrl-C, not even while they import: who started them does."""
    if sys.platform == "win32":
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
