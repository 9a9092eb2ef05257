"""Files of the index mapped into memory.

The pages of such a file that were looked at count as memory of the process, though they are the system's cache of the
file. Given back, they cost next to nothing to get again.
"""

import ctypes
import mmap
import sys
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pyarrow as pa

from dressage.index.columns import Array

MUCH = 300 << 20
"""Bytes of memory."""
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


def relieve() -> None:
    """Gives the pages of all files, and memory that is free, back to the system if the process has much."""
    if _resident() > MUCH:
        for each in list(_maps):
            each.madvise(mmap.MADV_DONTNEED)
        pa.default_memory_pool().release_unused()
        if _trim is not None:
            _trim(0)


def _resident() -> int:
    """Returns the bytes of memory that the process has; 0 where that is not known."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


def _map(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    _maps.add(whole)
    return whole
