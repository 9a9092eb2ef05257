"""Rows taken a few at a time, so that an intermediate result of all rows is never in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

# 256 rows of a vocabulary of 150,000 tokens take about 150 MB in float32.
CHUNK = 256

Visit = Callable[[Sequence[slice]], Iterable[slice]]
_visit: Visit = iter


def chunks(rows: int, size: int = CHUNK) -> Iterator[slice]:
    """Return slices of up to `size` rows that cover all rows."""
    return iter(_visit([slice(start, min(start + size, rows)) for start in range(0, rows, size)]))


@contextmanager
def visiting(visit: Visit) -> Iterator[None]:
    """Go only through those chunks that `visit` returns of all, inside the block and in all threads.

    What is computed is wrong then. A simulation counts a chunk for others like it.
    """
    global _visit
    before, _visit = _visit, visit
    try:
        yield
    finally:
        _visit = before
