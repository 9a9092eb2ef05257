"""The turns of all rollouts, stored like their texts, so that they can be shown and searched at once."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.blocks import Blocks
from cavesson.index.columns import Array
from cavesson.index.folder import TEXT_ROWS as ROWS
from cavesson.index.folder import State
from cavesson.index.snapshot import Snapshot
from cavesson.index.texts import CHUNK_BYTES, CHUNK_ROWS, PORTION
from cavesson.record import Run
from cavesson.record.keys import rollout_keys
from cavesson.record.schema import TURN_COLUMNS, arrow_schema

NAME = "turns"
TEXTS = ("name", "arguments", "text", "error")
"""What can be found in a turn."""
COLUMNS = ("turn", "role", *TEXTS)
NONE = arrow_schema(c for c in TURN_COLUMNS if c.name in COLUMNS).empty_table().select(COLUMNS)
PLACE = pa.field("place", pa.int64())


def due(state: State) -> bool:
    """Return whether there is a complete block of rows whose turns are not stored."""
    return "turns" in state.columns and state.rows - state.turns >= ROWS


def store_turns(folder: Path, state: State, run: Run) -> State:
    """Store the turns of the next rows and return the state that includes them."""
    first, stop = state.turns, min(state.turns + PORTION, state.rows) // ROWS * ROWS
    Blocks(folder, NAME).append(first, _blocks(run, Snapshot(folder, state), first, stop))
    return state.with_(turns=stop)


def read_turns(run: Run, snapshot: Snapshot, rows: Array, columns: Sequence[str] = COLUMNS) -> pa.Table:
    """Return the turns of some different rows, ordered by row and turn; none of rows that were superseded.

    Returns:
        The columns, and ``place``, the index of its row among ``rows``.
    """
    there = _has_turns(snapshot, rows)
    stored = rows < snapshot.state.turns
    parts = []
    if (wanted := np.flatnonzero(there & stored)).size:
        numbers = np.unique(rows[wanted] // ROWS)
        blocks = Blocks(snapshot.folder, NAME).read(snapshot.state.turns, numbers)
        tables = [pa.ipc.open_stream(pa.py_buffer(block)).read_all() for block in blocks]
        own = [number * ROWS + table["place"].to_numpy() for number, table in zip(numbers, tables, strict=True)]
        parts.append(_placed(pa.concat_tables(tables).select(columns), np.concatenate(own), rows, wanted))
    parts.append(recorded_turns(run, snapshot, rows, columns, there & ~stored))
    turns = pa.concat_tables(parts)
    place = turns["place"].to_numpy()
    if np.all(place[1:] >= place[:-1]):
        return turns
    return turns.take(pa.array(np.argsort(place, kind="stable")))


def recorded_turns(
    run: Run, snapshot: Snapshot, rows: Array, columns: Sequence[str] = COLUMNS, which: Array | None = None
) -> pa.Table:
    """Return the same as ``read_turns``, read from the record, ordered by turn; only of rows that ``which`` keeps."""
    wanted = np.flatnonzero(_has_turns(snapshot, rows) if which is None else which)
    if not len(wanted):
        return NONE.select(columns).append_column(PLACE, pa.array([], pa.int64()))
    turns = run.turns_of(snapshot.keys(rows[wanted]))
    own = (snapshot.raw("step")[rows].astype(np.int64) << 32) + snapshot.raw("sample")[rows]
    return _placed(turns.select(columns), rollout_keys(turns), own, wanted)


def _has_turns(snapshot: Snapshot, rows: Array) -> Array:
    """Return which of some rows are part of the run and have turns."""
    if "turns" not in snapshot.state.columns:
        return np.zeros(len(rows), np.bool_)
    known = ~np.isnan(snapshot.take("turns", rows).astype(float))
    return np.asarray(known if snapshot.alive is None else known & snapshot.alive[rows])


def _placed(lines: pa.Table, own: Array, numbers: Array, wanted: Array) -> pa.Table:
    """Return the turns of the wanted numbers, with ``place``, where the number of each stands among them.

    ``own`` is the number that each line belongs to; ``numbers`` are different, in any order.
    """
    order = wanted[np.argsort(numbers[wanted])]
    at = np.minimum(np.searchsorted(numbers[order], own), len(order) - 1)
    there = numbers[order][at] == own
    if not there.all():
        lines, at = lines.filter(pa.array(there)), at[there]
    return lines.append_column(PLACE, pa.array(order[at]))


def _blocks(run: Run, snapshot: Snapshot, first: int, stop: int) -> Iterator[bytes]:
    """Yield the blocks of the rows, reading as many rows together as fit well into memory."""
    size = ROWS
    while first < stop:
        rows = np.arange(first, min(first + size, stop))
        turns = recorded_turns(run, snapshot, rows)
        place = turns["place"].to_numpy()
        for start, end in pairwise(np.searchsorted(place, np.arange(0, len(rows) + 1, ROWS)).tolist()):
            within = pa.array(place[start:end] % ROWS)
            yield _packed(turns.select(COLUMNS).slice(start, end - start).append_column(PLACE, within))
        first += len(rows)
        size = max(min(CHUNK_ROWS, 8 * size, size * CHUNK_BYTES // max(turns.nbytes, 1)) // ROWS, 1) * ROWS


def _packed(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def are_in(turns: pa.Table, rows: int, pattern: str) -> Array:
    """Return [rows] whether any text of the turns of each row matches a regular expression."""
    found = np.zeros(rows, np.bool_)
    place = turns["place"].to_numpy()
    for name in TEXTS:
        hit = pc.fill_null(pc.match_substring_regex(turns[name], pattern), False)
        found[place[hit.to_numpy()]] = True
    return found
