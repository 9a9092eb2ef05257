"""Groups of consecutive steps, so that a chart of any run has no more points than a screen can show."""

from typing import NamedTuple

import numpy as np

from cavesson.index.columns import Array
from cavesson.index.rollups import Rollups
from cavesson.record.rollups import edges
from cavesson.sorted_arrays import distinct

BIN = np.dtype([("count", "<u4"), ("key", "<u2"), ("bucket", "<u2")])
SIGN = np.uint16(1 << 15)
"""Of a key; turned over, keys rise as unsigned numbers."""
QUANTILES = {"q05": 0.05, "q25": 0.25, "q50": 0.5, "q75": 0.75, "q95": 0.95}


class Buckets(NamedTuple):
    """Consecutive recorded steps in groups of equal size."""

    first: Array
    """[K] first step of each."""
    last: Array
    """[K] last step of each."""

    def of(self, steps: Array) -> Array:
        """Return the bucket of each step."""
        return np.searchsorted(self.first, steps, side="right") - 1

    def pairs(self) -> list[list[int]]:
        """Return the [first, last] steps of each bucket."""
        return [[int(a), int(b)] for a, b in zip(self.first, self.last, strict=True)]


def buckets(steps: Array, most: int) -> Buckets:
    """Return at most ``most`` buckets over the distinct values of ``steps``."""
    found = distinct(steps)
    size = max(1, -(-len(found) // most))
    first = np.ascontiguousarray(found[::size])
    return Buckets(first, np.append(found[size - 1 :: size], found[-1:])[: len(first)])


def summary(lines: Rollups, where: Array, size: int) -> dict[str, Array]:
    """Return the roll-up of each bucket: count, mean, sd, min, max and quantiles, NaN for buckets without values.

    ``lines`` are roll-ups of one column, at the level of rollouts; ``where`` is the bucket of each, of at most 65,536.
    """
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


def quantiles(lines: Rollups, where: Array, size: int, wanted: list[float]) -> Array:
    """Return [wanted, size] each quantile in each bucket, to the precision of the sketches."""
    # Pack each bin into one integer of bucket, key and count, which sorts several times faster.
    bins = np.empty(len(lines.bins["sketch_keys"]), BIN)
    bins["bucket"] = lines.of_bins(where)
    bins["key"] = lines.bins["sketch_keys"]
    bins["key"] ^= SIGN
    bins["count"] = lines.bins["sketch_counts"]
    bins.view("<u8").sort()
    if not len(bins):
        return np.full((len(wanted), size), np.nan)
    reached = np.cumsum(bins["count"], dtype=np.int64)
    ends = np.append(0, reached)[np.searchsorted(bins["bucket"], np.arange(size), side="right")]
    before = np.append(0, ends[:-1])
    # Find the bin that holds the value of rank ⌈q · total⌉.
    ranks = np.maximum(np.ceil(np.outer(wanted, ends - before)), 1).astype(np.int64)
    key = bins["key"][np.minimum(np.searchsorted(reached, before + ranks), len(bins) - 1)] ^ SIGN
    low, high = edges(key.view(np.int16))
    return np.asarray((low + high) / 2)
