"""Files of the index mapped into memory.

The pages of such a file that were looked at count as memory of the process, though they are the system's cache of the
file. Given back, they cost next to nothing to get again.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array
from cavesson.memory import resident

MUCH = 300 << 20
"""Bytes of memory."""
NEAR = 1 << 16
"""Bytes between two places of a file that cost less to read than to ask for twice."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_maps: "WeakSet[mmap.mmap]" = WeakSet()


def mapped(path: Path, dtype: np.dtype[np.void] | str, count: int) -> Array:
    """Returns the first ``count`` numbers of a file."""
    dtype = np.dtype(dtype)
    return np.frombuffer(_map(path, count * dtype.itemsize), dtype, count) if count else np.empty(0, dtype)


def mapped_table(path: Path) -> tuple[pa.Table, mmap.mmap]:
    """Returns the table in an Arrow file, and the file in memory."""
    whole = _map(path, 0)
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(whole))).read_all(), whole


def ask_for(paths: Iterable[Path]) -> None:
    """Lets the disk bring files that will soon be mapped, without waiting for them."""
    for path in paths if sys.platform == "linux" else ():
        with suppress(FileNotFoundError), path.open("rb") as file:  # another has taken its place meanwhile
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_ranges(path: Path, starts: Array, stops: Array) -> list[bytes]:
    """Returns the bytes of a file from each start to its stop; both rise.

    All are asked for before any is read, so that a disk brings them together; of a file in memory it would bring one
    after another, each with megabytes around it. And they cost no more memory than they are, not whole pages.
    """
    with path.open("rb", buffering=0) as file:
        if sys.platform == "linux" and len(starts):
            far = np.flatnonzero(starts[1:] - stops[:-1] > NEAR)
            first, last = np.append(starts[0], starts[far + 1]), np.append(stops[far], stops[-1])
            for start, size in zip(first.tolist(), (last - first).tolist(), strict=True):
                os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
        return [_read(file, start, stop - start) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


def _read(file: FileIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def relieve() -> None:
    """Gives the pages of all files, and memory that is free, back to the system if the process has much."""
    if resident() > MUCH:
        for each in list(_maps):
            each.madvise(mmap.MADV_DONTNEED)
        pa.default_memory_pool().release_unused()
        if _trim is not None:
            _trim(0)


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    _maps.add(whole)
    return whole
