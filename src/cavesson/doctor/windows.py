"""The latest parts of a run: what began late hardly shows in an average over a long run."""

from collections.abc import Iterator

from cavesson.doctor.data import RunData
from cavesson.doctor.recorded import CHANCE

SHORTEST = 16
"""Minimum number of steps of a window."""


def windows(data: RunData) -> Iterator[RunData]:
    """Yield the latest steps of a run, the most first: at most half of it, and half of that each time.

    Whatever began ``SHORTEST`` or more steps ago fills a window, more than half of the next larger one, and more than a
    quarter of the one after that. The windows share the level of one test, so that a test that is applied to all of
    them reports what chance explains no more often than a test that is applied once.
    """
    steps = data.steps
    several = lengths(len(steps) / 2)
    for length in several:
        yield data.part(int(steps[-length]), CHANCE / len(several))


def lengths(most: float) -> list[int]:
    """Return the numbers of steps of the windows that have at most this many, the largest first."""
    found: list[int] = []
    while SHORTEST << len(found) <= most:
        found.insert(0, SHORTEST << len(found))
    return found
