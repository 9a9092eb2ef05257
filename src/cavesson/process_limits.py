"""Limit the memory and CPU use of the board's processes."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder

import pyarrow as pa

# Constants from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
ARENAS = 2
LARGE = 1 << 20
"""Bytes of a piece of memory that goes back to the system as soon as it is free."""
REUSED = 32 << 20
"""The same where answers must come fast: a column of a million rows is written to fresh memory in 1.6 ms, and in 0.2 ms
to memory that was used before."""

FILES = 10_240
"""Open files, of which every mapped file of an index is one; macOS grants no more."""


def small_process(large: int = LARGE) -> None:
    """Save memory, and a third of a second at startup.

    A block of memory of at least ``large`` bytes is returned to the system as soon as it is freed.
    """
    pa.set_memory_pool(pa.system_memory_pool())
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, large)
        mallopt(M_TRIM_THRESHOLD, 2 * large)
    without_pandas()


def without_pandas() -> None:
    """Keep pyarrow from loading pandas with the first array, which saves a third of a second.

    For processes that do not need pandas; code that imports pandas itself is not affected.
    """
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    pa.array([])  # pyarrow looks for pandas only once
    sys.meta_path.remove(finder)


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def many_files() -> None:
    """Raise the limit of open files of this process to ``FILES``, or as far as the system allows; not on Windows."""
    if sys.platform != "win32":
        import resource

        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        granted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, granted), most))


def yield_cpu(niceness: int) -> None:
    """Give other processes on the machine priority by raising the nice value; has no effect on Windows."""
    if sys.platform != "win32":
        os.nice(niceness)


@contextmanager
def without_ctrl_c() -> Iterator[None]:
    """Block Ctrl-C for processes started in this block, even while they import; only the parent receives it."""
    if sys.platform == "win32":
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
