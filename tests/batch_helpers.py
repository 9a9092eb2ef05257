"""Batches for tests."""

from collections.abc import Iterator

from cavesson.types import Batch


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """The rows of a batch in order, a few at a time."""
    return (batch.part(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size))
