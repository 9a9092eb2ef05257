"""Columns of rewards that were computed again, which are written anew whenever there are more of them."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from cavesson.index.columns import write_at
from cavesson.index.folder import ColumnFile, State
from cavesson.index.snapshot import Snapshot
from cavesson.record import Run
from cavesson.record.keys import rows_of_tokens
from cavesson.record.rescored import read_rescored, rescored_cursor, rescored_names

PREFIX = "rescore/"
"""Of the names of these columns."""


def add_rescored(folder: Path, state: State, run: Run) -> State:
    """Return the state with the current rewards of the record, or the same state if they have not changed."""
    names = rescored_names(run.storage) if state.rows else []
    for name in set(state.rescored) - set(names):
        state = _without(state, name)
    for name in names:
        cursor = rescored_cursor(run.storage, name)
        if state.rescored.get(name) not in (cursor, f"{cursor} {state.rows}"):
            state = _stored(folder, _without(state, name), run, name, cursor)
    return state


def _without(state: State, name: str) -> State:
    columns, orders, rescored = dict(state.columns), dict(state.orders), dict(state.rescored)
    columns.pop(PREFIX + name, None)
    orders.pop(PREFIX + name, None)
    rescored.pop(name, None)
    return state.with_(columns=columns, orders=orders, rescored=rescored)


def _stored(folder: Path, state: State, run: Run, name: str, cursor: str) -> State:
    """Return the state with a new file of a column; older states may still be in use."""
    found = read_rescored(run.storage, name, run.rows(["step", "sample", "attempt"]))
    snapshot = Snapshot(folder, state)
    alive = np.arange(state.rows) if snapshot.alive is None else np.flatnonzero(snapshot.alive)
    indexed = pa.table({key: snapshot.raw(key)[alive] for key in ("step", "sample")})
    at, is_there = rows_of_tokens(indexed, found)
    values = np.full(state.rows, np.nan, "<f4")
    values[alive[at[is_there]]] = found["reward"].to_numpy()[is_there]
    for path in folder.glob("rescore-*"):
        if path.name not in {one.file for one in state.columns.values()} | {f"rescore-{state.rescored_files}"}:
            path.unlink()
    number = state.rescored_files + 1
    column = ColumnFile(f"rescore-{number}", "<f4", missing=True)
    write_at(folder / column.file, 0, values)
    # Rollouts that are not indexed yet are looked up again once there are more rows.
    rescored = {**state.rescored, name: cursor if is_there.all() else f"{cursor} {state.rows}"}
    columns = {**state.columns, PREFIX + name: column}
    return state.with_(columns=columns, rescored=rescored, rescored_files=number)
