"""Memory-mapped files of the index.

Pages of such a file that were read count towards the memory of the process, although they belong to the page cache of
the system. After they are released, it costs almost nothing to map them again.
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
from cavesson.record.files import replacing

MUCH = 300 << 20
"""Bytes of memory."""
NEAR = 1 << 16
"""Bytes between two places of a file that cost less to read than to ask for twice."""
_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
_maps: "WeakSet[mmap.mmap]" = WeakSet()


def mapped(path: Path, dtype: np.dtype[np.void] | str, count: int) -> Array:
    """Return the first ``count`` numbers of a file as a memory-mapped array."""
    dtype = np.dtype(dtype)
    return np.frombuffer(_map(path, count * dtype.itemsize), dtype, count) if count else np.empty(0, dtype)


def mapped_table(path: Path) -> tuple[pa.Table, mmap.mmap]:
    """Return the table in an Arrow file, and the memory map that holds it."""
    whole = _map(path, 0)
    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(whole))).read_all(), whole


def write_table(path: Path, table: pa.Table) -> None:
    """Write an Arrow file that ``mapped_table`` reads."""
    with replacing(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def ask_for(paths: Iterable[Path]) -> None:
    """Tell the system to read ahead files that will soon be mapped, without waiting for them."""
    for path in paths if sys.platform == "linux" else ():
        with suppress(FileNotFoundError), path.open("rb") as file:  # replaced by another file in the meantime
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def read_ranges(path: Path, starts: Array, stops: Array) -> list[bytes]:
    """Return the bytes of a file from each start to its stop; both are ascending.

    All ranges are requested before any is read, so that the disk can fetch them together. With a memory map, it would
    fetch them one after another, each with megabytes around it, and whole pages would stay in memory.
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


def release_memory() -> None:
    """Release the pages of all mapped files and free memory to the system if the process uses much memory."""
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
