"""Rows sorted by each column. For a large run, the orders are computed in advance, so that no click waits for them."""

from pathlib import Path

import numpy as np

from cavesson.index.columns import CODED, MISSING, Array
from cavesson.index.folder import State
from cavesson.index.snapshot import Snapshot

MIN_ROWS = 200_000
"""A smaller column is sorted when it is asked for."""
GROWTH = 1.2
"""Columns are sorted again when there are so many times as many rows; what comes in between is sorted in."""
NOT_SORTED_BY = {*CODED, "prompt", "attempt", "rank"}


def order(snapshot: Snapshot, name: str) -> Array:
    """Return [rows] row numbers by ascending value, in index order for equal values; missing values come last.

    The column ``step`` sorts by step and sample.
    """
    stored = snapshot.stored_order(name)
    if stored is None:
        return ascending(snapshot, name)
    if len(stored) == snapshot.rows:
        return stored
    values = _values(snapshot, name)
    tail = len(stored) + np.argsort(values[len(stored) :], kind="stable")
    return np.insert(stored, np.searchsorted(values[stored], values[tail], side="right"), tail).astype("<i4")


def ascending(snapshot: Snapshot, name: str) -> Array:
    """Return the same as ``order``, computed from the values without a stored order."""
    values = _values(snapshot, name)
    if values.dtype.itemsize == 4:
        return _packed_order(values)
    if np.all(values[1:] >= values[:-1]):
        return np.arange(len(values), dtype="<i4")
    return np.argsort(values, kind="stable").astype("<i4")


def _values(snapshot: Snapshot, name: str) -> Array:
    """Return [rows] values that sort like the column."""
    values = snapshot.raw(name)
    if name == "step":
        return values.astype(np.int64) << 32 | snapshot.raw("sample").astype(np.int64)
    if values.dtype.kind == "f":
        return values
    column = snapshot.state.columns[name]
    largest = np.iinfo(values.dtype).max
    return np.where(values == MISSING[column.dtype], largest, values) if column.missing else values


def _packed_order(values: Array) -> Array:
    """Sort 64-bit numbers composed of value and row, which is several times faster than sorting rows by value."""
    if values.dtype.kind == "f":
        bits = (values + np.float32(0)).view(np.uint32)  # adding 0 turns −0 into 0
        keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
        keys[np.isnan(values)] = np.iinfo(np.uint32).max
    else:
        keys = values.view(np.uint32) ^ np.uint32(1 << 31)
    packed = keys.astype(np.uint64) << np.uint64(32) | np.arange(len(values), dtype=np.uint64)
    packed.sort()
    return packed.astype(np.uint32).view("<i4")


def due(state: State) -> bool:
    """Return whether the columns should be sorted now."""
    return state.rows >= MIN_ROWS and state.rows > GROWTH * state.ordered_rows


def store_orders(folder: Path, state: State) -> State:
    """Write the order of every column by which a table can be sorted."""
    snapshot = Snapshot(folder, state)
    orders = {}
    for number, name in enumerate(name for name in snapshot.names if name not in NOT_SORTED_BY):
        # A new name, because an older state may still be in use.
        orders[name] = f"order-{number:03d}-{state.rows}"
        ascending(snapshot, name).tofile(folder / orders[name])
    for path in folder.glob("order-*"):
        if path.name not in {*orders.values(), *state.orders.values()}:
            path.unlink()
    return state.with_(orders=orders, ordered_rows=state.rows)


def places(values: Array, order: Array, bounds: Array, side: str) -> Array:
    """Return the position of each bound among the sorted values, as ``numpy.searchsorted`` does.

    ``order`` are the rows of the column by ascending value, without NaN; ``side`` ``left`` is the position before equal
    values.
    """
    low, high = np.zeros(len(bounds), np.int64), np.full(len(bounds), len(order))
    while np.any(open_ := low < high):
        middle = (low + high) // 2
        value = values[order[np.minimum(middle, len(order) - 1)]].astype(np.float64)
        before = open_ & (value < bounds if side == "left" else value <= bounds)
        low = np.where(before, middle + 1, low)
        high = np.where(open_ & ~before, middle, high)
    return low
