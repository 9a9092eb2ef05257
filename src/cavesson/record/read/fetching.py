"""Fetch rollouts by key, reading little more of the files than the parts that contain them."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cavesson.errors import UserError
from cavesson.record.keys import rollout_keys
from cavesson.record.lines import lines_at_places, lines_of_keys, lines_of_steps
from cavesson.record.precision import Array
from cavesson.record.schema import (
    PLACE_COLUMNS,
    ROW_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_PLACES,
    TURN_COLUMNS,
    TURN_PLACES,
    Column,
    arrow_schema,
)
from cavesson.record.segments import Kind, LiveSegments, Segment, union, with_steps
from cavesson.record.storage import Storage
from cavesson.text.counting import counted

OF_ROLLOUT: dict[Kind, tuple[Sequence[Column], Sequence[Column]]] = {
    "tokens": (TOKEN_COLUMNS, TOKEN_PLACES), "turns": (TURN_COLUMNS, TURN_PLACES)
}  # fmt: skip
"""What a rollout consists of: its columns, and those of its rows that say where it is."""


def fetched(storage: Storage, live: LiveSegments, keys: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Return columns and the step of some rollouts, given by step and sample, in the requested order.

    Raises:
        UserError: The record has no such rollout.
    """
    asked = np.array([(step << 32) + sample for step, sample in keys], np.int64)
    wanted, inverse = np.unique(asked, return_inverse=True)
    fields = [column for column in (*ROW_COLUMNS, *PLACE_COLUMNS) if column.name in columns]
    tables, which = [arrow_schema(fields).empty_table()], [np.array([], np.int64)]
    for segment in with_steps(live.rows, {step for step, _ in keys}):
        # A table of a file that has none of the columns would have no rows.
        some, at = lines_of_keys(storage, segment, [*columns, "step"], wanted)
        tables, which = tables + some, which + at
    there, first = np.unique(np.concatenate(which), return_index=True)  # a key that is there twice counts once
    if len(there) < len(wanted):
        missing = int(np.setdiff1d(np.arange(len(wanted)), there)[0])
        step, sample = keys[list(inverse).index(missing)]
        count = counted(_rollouts_of(storage, live, step), "rollout")
        raise UserError(f"{storage.root} has no sample {sample} in step {step}, which has {count}")
    return union(*tables).take(first[inverse])


def fetched_lines(storage: Storage, live: LiveSegments, kind: Kind, keys: Array) -> pa.Table:
    """Return the tokens or turns of some rollouts, unordered; ``keys`` are those of ``rollout_keys``, ascending."""
    columns, places = OF_ROLLOUT[kind]
    names = [column.name for column in places]
    parts = [arrow_schema(columns).empty_table()]
    for segment in with_steps(live.rows, np.unique(keys >> 32).tolist()):
        tables, _ = lines_of_keys(storage, segment, names, keys)
        if tables and (kind == "tokens" or tables[0].num_columns):
            parts.append(_lines_in(storage, segment, kind, keys, union(*tables)))
    return union(*parts)


def _rollouts_of(storage: Storage, live: LiveSegments, step: int) -> int:
    segments = with_steps(live.rows, {step})
    return sum(lines_of_steps(storage, segment, "rows", ["sample"], {step}).num_rows for segment in segments)


def _lines_in(storage: Storage, segment: Segment, kind: Kind, keys: Array, places: pa.Table) -> pa.Table:
    """Return the tokens or turns that one segment has of the rollouts, using their recorded places if there are any."""

    def wanted(lines: pa.Table) -> pa.Table:
        return lines.filter(pa.array(np.isin(rollout_keys(lines), keys)))

    names = [column.name for column in OF_ROLLOUT[kind][1]]
    if set(places.column_names) == set(names):
        there = places.drop_null()
        start, count = (there[name].to_numpy() for name in names)
        if len(there) == len(places) or kind == "turns":  # only tokens can be there without a place, in older records
            lines = wanted(lines_at_places(storage, segment, kind, start, count))
            if lines.num_rows == count.sum():
                return lines
    # An older record lacks the places of the tokens, or rollouts have just been added to the step.
    return wanted(lines_of_steps(storage, segment, kind, None, np.unique(keys >> 32).tolist()))
