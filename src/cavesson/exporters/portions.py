"""The rollouts of a run in portions, which can be read while the run is recorded and merged."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from cavesson.record.read.reader import Run
from cavesson.record.segments import Kind

AT_ONCE = 2_000
"""Rollouts in memory at a time, or those of one step."""


def rollouts_by_step(run: Run) -> dict[int, int]:
    """Return the number of rollouts of every step, ordered by step."""
    steps, counts = np.unique(run.rows(["step"])["step"].to_numpy(), return_counts=True)
    return dict(zip(steps.tolist(), counts.tolist(), strict=True))


def portions(counts: dict[int, int]) -> Iterator[list[int]]:
    """Yield groups of steps to read together, in order, by the number of rollouts of every step."""
    steps: list[int] = []
    size = 0
    for step, count in counts.items():
        if steps and size + count > AT_ONCE:
            yield steps
            steps, size = [], 0
        steps.append(step)
        size += count
    if steps:
        yield steps


def schemas(run: Run, kind: Kind) -> list[pa.Schema]:
    """Return the schemas of all files of a kind."""
    return run.consistent(lambda found: [run.read(segment, kind, count=0).schema for segment in found.rows])
