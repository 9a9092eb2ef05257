"""Distributions of a number: in a selection, over the run, and over the positions in the responses."""

from typing import Any

import numpy as np
from pydantic import Field

from cavesson.board.buckets import Buckets, buckets
from cavesson.board.runs import Board
from cavesson.board.search import matching
from cavesson.board.selection import Order, Selection, SplitQuery, column_of, order_of
from cavesson.board.series import lines_of, rollups_of
from cavesson.errors import UserError
from cavesson.index.columns import Array
from cavesson.index.orders import places
from cavesson.record.rollups import BIN
from cavesson.record.rollups import edges as bin_edges
from cavesson.record.splits import HELD_OUT
from cavesson.sorted_arrays import distinct
from cavesson.text.features import slices

CENTRAL = 0.0005
"""Share of the values that may lie beyond either end of the edges: one outlier must not flatten the rest."""
CHUNK = 1 << 17
LONG = 0.01
"""Positions of a heat map end where only this share of the responses goes on."""
MIN_BINS = 64 // BIN
LARGEST = 1e300
"""A wider range would have an infinite width."""


class HistogramQuery(Selection):
    column: str = Field("reward", max_length=200)
    """Column."""
    bins: int = Field(40, ge=1, le=1_000)
    """Number of bins."""
    lo: float | None = Field(None, ge=-LARGEST, le=LARGEST)
    """Lower end of the first bin; chosen from the values if not given."""
    hi: float | None = Field(None, ge=-LARGEST, le=LARGEST)
    """Upper end of the last bin."""


class RidgeQuery(SplitQuery):
    column: str = Field("reward", max_length=200)
    """Column."""
    bins: int = Field(60, ge=1, le=500)
    """Number of bins."""
    buckets: int = Field(40, ge=1, le=500)
    """Maximum number of groups of steps."""


class HeatQuery(SplitQuery):
    column: str = Field("kl_k1", max_length=200)
    """Token column."""
    buckets: int = Field(100, ge=1, le=500)
    """Maximum number of groups of steps."""
    positions: int = Field(128, ge=1, le=1_000)
    """Maximum number of groups of positions."""


def histogram(board: Board, query: HistogramQuery) -> dict[str, Any]:
    """Return how many values of a column are between the edges; the last bin includes its upper edge."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    values = column_of(snapshot, query.column)
    mask = matching(run, snapshot, query).mask
    if mask is None and values.dtype.itemsize == 4:
        return _sorted_histogram(values, order_of(run, snapshot, query.column), query)
    if mask is not None:
        values = values[mask]
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    edges = edges_of(finite, query.bins, query.lo, query.hi)
    return count_bins(finite, edges) | {"missing": len(values) - len(finite)}


def _sorted_histogram(values: Array, order: Order, query: HistogramQuery) -> dict[str, Any]:
    """Return the histogram of all rows. As the rows are sorted, it takes a few look-ups per edge."""
    rows = order.rows[: order.measured]
    ends = np.array([-np.finfo(np.float64).max, np.finfo(np.float64).max])
    first, stop = places(values, rows, ends, "left").tolist()
    rows = rows[first:stop]
    spread = values[rows[np.linspace(0, len(rows) - 1, min(len(rows), 10_000)).astype(np.int64)]]
    edges = edges_of(spread, query.bins, query.lo, query.hi)
    reached = places(values, rows, edges, "left")
    reached[-1] = places(values, rows, edges[-1:], "right")[0]
    below, above = int(reached[0]), len(rows) - int(reached[-1])
    missing = len(values) - len(rows)
    return {"edges": edges, "counts": np.diff(reached), "below": below, "above": above, "missing": missing}


def edges_of(values: Array, bins: int, low: float | None, high: float | None) -> Array:
    """Return the edges of bins of equal width, from ``low`` to ``high`` or, if None, chosen from the values."""
    if len(values) and (low is None or high is None):
        ends = robust_ends(values)
        low, high = ends[0] if low is None else low, ends[1] if high is None else high
    low, high = low if low is not None else 0.0, high if high is not None else 1.0
    if not low < high:
        room = max(0.5, abs(low) * 1e-6)
        low, high = low - room, low + room
    return np.linspace(low, high, bins + 1)


def robust_ends(values: Array) -> tuple[float, float]:
    """Return bounds that contain nearly all values; the minimum and maximum themselves if they are not far outside."""
    sample = values if len(values) <= 200_000 else values[:: len(values) // 100_000]
    low, high = (float(x) for x in np.quantile(sample, [CENTRAL, 1 - CENTRAL]))
    smallest, largest, room = float(values.min()), float(values.max()), (high - low) / 2
    return (smallest if smallest >= low - room else low), (largest if largest <= high + room else high)


def count_bins(values: Array, edges: Array) -> dict[str, Any]:
    """Return the number of finite values in each bin of equal width, below the first bin, and above the last one."""
    bins, low, high = len(edges) - 1, float(edges[0]), float(edges[-1])
    counts = np.zeros(bins + 2, np.int64)
    # Process chunks that fit into the processor's cache.
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK].astype(np.float64)
        place = np.floor((chunk - low) * (bins / (high - low))) + 1
        place[chunk == high] = bins
        counts += np.bincount(np.clip(place, 0, bins + 1).astype(np.intp), minlength=bins + 2)
    return {"edges": edges, "counts": counts[1:-1], "below": int(counts[0]), "above": int(counts[-1])}


def ridge(board: Board, query: RidgeQuery) -> dict[str, Any]:
    """Return the distribution of a column over the rollouts of a split in each group of steps."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    column_of(snapshot, query.column)
    lines = lines_of(snapshot, rollups_of(run, snapshot, query.column), query.split)
    grouping = buckets(lines.step, query.buckets)
    key, of, count = lines.bins["sketch_keys"], lines.of_bins(grouping.of(lines.step)), lines.bins["sketch_counts"]
    keys = distinct(key)
    low, high = bin_edges(keys)
    middle = (low + high) / 2
    number = np.searchsorted(keys, key)
    edges = edges_of(_spread(middle, np.bincount(number, count)), query.bins, None, None)
    place = np.clip(np.searchsorted(edges, middle, side="right") - 1, 0, query.bins - 1)
    size = len(grouping.first) * query.bins
    counts = np.bincount(of * query.bins + place[number], count, minlength=size).astype(np.int64)
    return {"edges": edges, "steps": grouping.pairs(), "counts": counts.reshape(-1, query.bins)}


def _spread(values: Array, counts: Array) -> Array:
    """Return the ascending values, repeated about in proportion to their counts, at most 4,000 in total."""
    if not len(values):
        return values
    reached = np.cumsum(counts)
    ranks = np.linspace(0, reached[-1] - 1, min(int(reached[-1]), 4_000))
    return values[np.searchsorted(reached, ranks, side="right")]


def heat(board: Board, query: HeatQuery) -> dict[str, Any]:
    """Return the mean of a token metric by step and position in the response, from the roll-ups."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    known = rollups_of(run, snapshot, query.column, level="token")
    lines = lines_of(snapshot, known, query.split)
    if not known.lines["bins"].any():
        raise UserError(f"no token of the run has the column {query.column[:100]!r}")
    if not lines.lines["bins"].any():
        kind = "training" if query.split == HELD_OUT else "held-out"
        raise UserError(f"only tokens of {kind} responses have the column {query.column[:100]!r}")
    steps = buckets(lines.step, query.buckets)
    position = slices(np.zeros(len(lines.lines), np.int64), lines.lines["bins"])
    places = _positions(position, lines.bins["bin_counts"], query.positions)
    shape = (len(steps.first), len(places.first))
    cell = lines.of_bins(steps.of(lines.step)) * shape[1] + places.of(position)
    count, total = (
        np.bincount(cell, values, minlength=shape[0] * shape[1]).reshape(shape)
        for values in (lines.bins["bin_counts"], lines.bins["bin_sums"])
    )
    with np.errstate(all="ignore"):
        mean = total / count
    positions = [[low * BIN, high * BIN + BIN - 1] for low, high in places.pairs()]
    return {"steps": steps.pairs(), "positions": positions, "mean": mean, "count": count.astype(np.int64)}


def _positions(position: Array, count: Array, most: int) -> Buckets:
    """Return groups of positions up to where 99 % of the responses have ended; the last group includes the rest.

    Otherwise, a single response that is a hundred times as long as the others would shrink them to a line of pixels.
    """
    per_position = np.bincount(position, count)
    reached = np.flatnonzero(per_position >= LONG * per_position.max())[-1] + 1
    shown = min(max(int(reached), MIN_BINS), len(per_position))
    places = buckets(np.arange(shown), most)
    places.last[-1] = len(per_position) - 1
    return places
