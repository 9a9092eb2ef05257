"""Sorted orders of the columns of a large run, made beforehand so that no click waits for them."""

from pathlib import Path

import numpy as np

from dressage.index.columns import CODED, Array
from dressage.index.folder import State
from dressage.index.snapshot import Snapshot

FEWEST_ORDERED = 200_000
"""A smaller column is sorted when it is asked for."""
NOT_SORTED_BY = {*CODED, "prompt_hash", "attempt", "rank"}


def ascending(snapshot: Snapshot, name: str) -> Array:
    """Returns [rows] row numbers by rising value, rows of equal value as they come; not measured ones last."""
    if not snapshot.rows:
        return np.empty(0, np.int32)
    if name == "step":
        key = snapshot.raw("step").astype(np.int64) << 32 | snapshot.raw("sample").astype(np.int64)
        return np.argsort(key, kind="stable").astype(np.int32)
    return np.argsort(snapshot.column(name), kind="stable").astype(np.int32)


def store_orders(folder: Path, state: State) -> State:
    """Writes the order of every column that a table may be sorted by."""
    snapshot = Snapshot(folder, state)
    orders = {}
    for number, name in enumerate(name for name in state.columns if name not in NOT_SORTED_BY):
        # Under a new name: an older state may still be read.
        orders[name] = f"order-{number:03d}-{state.rows}"
        ascending(snapshot, name).astype("<i4").tofile(folder / orders[name])
    for path in folder.glob("order-*"):
        if path.name not in {*orders.values(), *state.orders.values()}:
            path.unlink()
    return state.with_(orders=orders, ordered_rows=state.rows)
