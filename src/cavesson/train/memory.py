"""What becomes of CPU memory that is freed, and what to change if there is not enough memory."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.errors import NoMemoryError, no_memory

# Constants from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT_BELOW = 32 * 2**20
"""Larger pieces are given back, which nothing can change: the largest threshold that glibc accepts."""
_RETURNED_FROM = 2**17
"""Pieces that `return_freed_memory` gives back, in bytes: glibc's own default."""


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    A step frees about as much memory as the next one needs. If it is returned, the next step gets new pages, which the
    kernel must clear one by one: the first passes of a 135-million-parameter model then take up to twice as long. Other
    C libraries are not changed.
    """
    _set(mapped_from=_KEPT_BELOW, trimmed_from=2**31 - 1)


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system at once.

    Sharded weights are gathered and freed layer by layer. Kept, the pieces of all layers would add up to more than the
    whole model, because pieces of the next layer do not fit where others have been.
    """
    _set(mapped_from=_RETURNED_FROM, trimmed_from=_RETURNED_FROM)


def _set(mapped_from: int, trimmed_from: int) -> None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    libc.mallopt(_MMAP_THRESHOLD, mapped_from)
    libc.mallopt(_TRIM_THRESHOLD, trimmed_from)


@contextmanager
def enough_memory(place: Callable[[], str], advice: str) -> Iterator[None]:
    """Convert the error of a device that does not have enough memory for what this block does.

    Its message says the place of the run, and the advice on what to change.

    Raises:
        NoMemoryError: there was not enough.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = no_memory(error)
        if reason is None:
            raise
        raise NoMemoryError(f"{place()}: {reason}\n{advice}") from error


def less_memory(settings: RolloutRun | ExampleRun) -> str:
    """Return which settings, different from what they are, would let a run need less memory."""
    ways, update = [], settings.update
    sampling = settings.sampling if isinstance(settings, RolloutRun) else None
    if update.micro_batch_tokens is not None:
        ways.append(f"a smaller update.micro_batch_tokens (now {update.micro_batch_tokens})")
    elif update.micro_batch_size != 1 and not update.in_backward:
        ways.append(f"a smaller update.micro_batch_size (now {update.micro_batch_size or 'all rows'})")
    if sampling is not None and sampling.declared.can("sampling.batch_size") and sampling.batch_size != 1:
        ways.append(f"a smaller sampling.batch_size (now {sampling.batch_size or 'all responses'})")
    if settings.model.gradient_checkpointing is not True:
        ways.append("model.gradient_checkpointing = true")
    if settings.parallel.shard == "none":
        ways.append('several processes with parallel.shard = "full"')
    return f"What needs less: {', '.join(ways)}" if ways else "Train on more devices, or on larger ones"
