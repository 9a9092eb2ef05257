"""The C library's heap: memory of a run on CPU beyond what its tensors take."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from cavesson.train.memory import KEPT_BELOW, RETURNED_FROM, keep_freed_memory, return_freed_memory

ALIGNMENT = 64
"""gAlignment in PyTorch's c10/core/alignment.h."""
_PAGE = 4096
_NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE: otherwise the header of a block would make 2 MB resident


class Heap:
    """The heap of this process, used as a run would use it.

    The heap grows beyond the live bytes, because of holes between blocks. PyTorch requests memory aligned to 64 bytes.
    glibc serves `posix_memalign` from a free block that is larger than the request by the alignment and the minimum
    block size. The hole that a tensor leaves is therefore too small for the next tensor of its size unless a neighbour
    is freed as well (glibc bug 14581), and small objects fill it. Without sharding, `train.memory` returns nothing
    below 32 MB to the system, and activations take up to 1.8 times their own size. With sharding, it returns whatever
    is freed from 128 KB on, and only smaller blocks leave holes.

    Only glibc itself can tell how much that is; a constant factor is wrong by more than 15 % (docs/check.md). So every
    storage of a computation on fake tensors is really allocated here, in the same order, and never written to. Memory
    that is never written to uses only address space. Every page that a block touches is counted once, because it would
    stay resident.

    Args:
        is_sharded: whether the weights of the run are sharded.
    """

    def __init__(self, is_sharded: bool = False) -> None:
        (return_freed_memory if is_sharded else keep_freed_memory)()
        self.mapped_from = RETURNED_FROM if is_sharded else KEPT_BELOW
        """bytes of the smallest pieces that are mapped separately, and returned to the system when they are freed"""
        self._libc = _glibc()
        self._libc.prctl(_NO_HUGE_PAGES, 1, 0, 0, 0)
        self._begin = _heap_begin()
        self._touched = np.zeros(0, dtype=bool)
        self._kept = 0
        self._mapped = 0
        self.peak = 0
        """bytes on pages of the heap that were ever used, and those of pieces that are mapped, at the peak"""

    def take(self, size: int) -> tuple[int, int]:
        """Allocate bytes, and return the address and size.

        Raises:
            MemoryError: there is not enough address space.
        """
        place = ctypes.c_void_p()
        if self._libc.posix_memalign(ctypes.byref(place), ALIGNMENT, max(1, size)):
            raise MemoryError(f"no addresses for {size} bytes")
        address = place.value or 0
        if size >= self.mapped_from:
            self._mapped += size
        else:
            self._touch(address, size)
        self.peak = max(self.peak, self._kept + self._mapped)
        return address, size

    def give(self, piece: tuple[int, int]) -> None:
        """Free an allocation returned by `take`."""
        address, size = piece
        self._mapped -= size if size >= self.mapped_from else 0
        self._libc.free(ctypes.c_void_p(address))

    def close(self) -> None:
        self._libc.prctl(_NO_HUGE_PAGES, 0, 0, 0, 0)

    def _touch(self, address: int, size: int) -> None:
        first, behind = (address - self._begin) // _PAGE, -(-(address + size - self._begin) // _PAGE)
        if first < 0 or behind > 2**32:  # in another heap, which glibc creates if this one cannot grow
            self._kept += size
            return
        if behind > len(self._touched):
            more = np.zeros(max(behind - len(self._touched), len(self._touched)), dtype=bool)
            self._touched = np.concatenate([self._touched, more])
        pages = self._touched[first:behind]
        self._kept += _PAGE * int(len(pages) - pages.sum())
        pages[:] = True


def has_glibc() -> bool:
    """Return whether this process uses glibc's heap."""
    try:
        _glibc()
        _heap_begin()
    except (OSError, AttributeError, StopIteration):
        return False
    return True


def _glibc() -> Any:
    libc = ctypes.CDLL("libc.so.6")
    libc.gnu_get_libc_version.restype = ctypes.c_char_p
    libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return libc


def _heap_begin() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return int(next(line for line in lines if line.endswith("[heap]")).partition("-")[0], 16)
