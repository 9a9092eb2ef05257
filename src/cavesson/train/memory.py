"""What becomes of CPU memory that is freed."""

import ctypes

# Constants from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
KEPT_BELOW = 32 * 2**20
"""Larger pieces are given back, which nothing can change: the largest threshold that glibc accepts."""
RETURNED_FROM = 2**17
"""Pieces that `return_freed_memory` gives back, in bytes: glibc's own default."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    A step frees about as much memory as the next one needs. If it is returned, the next step gets new pages, which the
    kernel must clear one by one: the first passes of a 135-million-parameter model then take up to twice as long. Other
    C libraries are not changed.
    """
    _set(mapped_from=KEPT_BELOW, trimmed_from=2**31 - 1)


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system at once.

    Sharded weights are gathered and freed layer by layer. Kept, the pieces of all layers would add up to more than the
    whole model, because pieces of the next layer do not fit where others have been.
    """
    _set(mapped_from=RETURNED_FROM, trimmed_from=RETURNED_FROM)


def _set(mapped_from: int, trimmed_from: int) -> None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(_MMAP_THRESHOLD, mapped_from)
    libc.mallopt(_TRIM_THRESHOLD, trimmed_from)
