"""Steps put together, so that a chart of any run has as many points as a screen can show."""

from typing import NamedTuple

import numpy as np

from dressage.index.columns import Array
from dressage.index.rollups import Rollups
from dressage.index.sets import distinct
from dressage.record.rollups import edges

QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class Buckets(NamedTuple):
    """Consecutive recorded steps in groups of equal size."""

    first: Array
    """[K] first step of each."""
    last: Array
    """[K] last step of each."""

    def of(self, steps: Array) -> Array:
        """Returns the bucket of each step."""
        return np.searchsorted(self.first, steps, side="right") - 1

    def pairs(self) -> list[list[int]]:
        """Returns [first, last] of each."""
        return [[int(a), int(b)] for a, b in zip(self.first, self.last, strict=True)]


def buckets(steps: Array, most: int) -> Buckets:
    """Returns at most ``most`` buckets over the distinct values of ``steps``."""
    found = distinct(steps)
    size = max(1, -(-len(found) // most))
    first = np.ascontiguousarray(found[::size])
    return Buckets(first, np.append(found[size - 1 :: size], found[-1:])[: len(first)])


def summary(lines: Rollups, grouping: Buckets) -> dict[str, Array]:
    """Returns the roll-up of each bucket: count, mean, sd, min, max and quantiles, NaN where nothing was measured.

    Args:
        lines: Roll-ups of one column, whole rollouts.
        grouping: Which steps belong together.
    """
    where, size = grouping.of(lines.step), len(grouping.first)
    total, sums, squares = (
        np.bincount(where, lines.lines[name], minlength=size) for name in ("count", "sum", "sum_squares")
    )
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.fmin.at(low, where, lines.lines["min"])
    np.fmax.at(high, where, lines.lines["max"])
    with np.errstate(all="ignore"):
        mean = sums / total
        sd = np.sqrt(np.maximum(squares / total - mean**2, 0))
    result = {"count": total.astype(np.int64), "mean": mean, "sd": sd, "min": low, "max": high}
    for name, values in zip(QUANTILES, quantiles(lines, where, size, list(QUANTILES.values())), strict=True):
        result[name] = np.clip(values, low, high)
    empty = total == 0
    return {name: values if name == "count" else np.where(empty, np.nan, values) for name, values in result.items()}


def sketches(lines: Rollups, where: Array) -> tuple[Array, Array, Array]:
    """Returns bucket, key and count of every bin of the sketches, sorted by bucket and key."""
    bucket, key = where[lines.line], lines.bins["sketch_keys"]
    order = np.argsort((bucket.astype(np.int64) << 16) + key, kind="stable")
    return bucket[order], key[order], lines.bins["sketch_counts"][order]


def quantiles(lines: Rollups, where: Array, size: int, wanted: list[float]) -> list[Array]:
    """Returns for each wanted quantile [size] its value in each bucket, as near as the sketches tell it."""
    bucket, key, count = sketches(lines, where)
    if not len(key):
        return [np.full(size, np.nan) for _ in wanted]
    reached = np.cumsum(count)
    total = np.bincount(bucket, count, minlength=size)
    before = np.cumsum(total) - total
    # The bin that holds the value of rank ⌈q · total⌉.
    places = [np.searchsorted(reached, before + np.maximum(np.ceil(q * total), 1)) for q in wanted]
    ends = [edges(key[np.minimum(place, len(key) - 1)]) for place in places]
    return [(low + high) / 2 for low, high in ends]
