"""Batches for tests."""

from collections.abc import Iterator

import torch

from cavesson.processes import Processes
from cavesson.train.update import Chosen
from cavesson.types import Batch

ALONE = Processes("cpu")
"""A single process."""


def split(batch: Batch, size: int) -> Iterator[Batch]:
    """The rows of a batch in order, a few at a time."""
    return (batch.part(range(start, min(start + size, len(batch)))) for start in range(0, len(batch), size))


def every(batch: Batch) -> Chosen:
    """All rows of the batch of a single process."""
    rows = torch.arange(len(batch))
    return Chosen(rows, rows, len(batch))
