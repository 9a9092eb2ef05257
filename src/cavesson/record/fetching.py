"""Fetch rollouts by key, reading little more of the files than the parts that contain them."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cavesson.errors import UserError
from cavesson.record.keys import rollout_keys
from cavesson.record.lines import lines_at_places, lines_of_keys, lines_of_steps
from cavesson.record.precision import Array
from cavesson.record.schema import PLACE_COLUMNS, ROW_COLUMNS, TOKEN_COLUMNS, arrow_schema
from cavesson.record.segments import LiveSegments, Segment, union, with_steps
from cavesson.record.storage import Storage
from cavesson.text.counting import counted

_PLACES = [column.name for column in PLACE_COLUMNS]


def fetched(storage: Storage, found: LiveSegments, keys: Sequence[tuple[int, int]], columns: Sequence[str]) -> pa.Table:
    """Return the rows of some rollouts, given by step and sample, in the requested order.

    Raises:
        UserError: The record has no such rollout.
    """
    asked = np.array([(step << 32) + sample for step, sample in keys], np.int64)
    wanted, place = np.unique(asked, return_inverse=True)
    fields = [column for column in (*ROW_COLUMNS, *PLACE_COLUMNS) if column.name in columns]
    tables, which = [arrow_schema(fields).empty_table()], [np.array([], np.int64)]
    for segment in with_steps(found.rows, {step for step, _ in keys}):
        some, at = lines_of_keys(storage, segment, columns, wanted)
        tables, which = tables + some, which + at
    there, first = np.unique(np.concatenate(which), return_index=True)  # a key that is there twice counts once
    if len(there) < len(wanted):
        missing = int(np.setdiff1d(np.arange(len(wanted)), there)[0])
        step, sample = keys[list(place).index(missing)]
        count = counted(_rollouts_of(storage, found, step), "rollout")
        raise UserError(f"{storage.root} has no sample {sample} in step {step}, which has {count}")
    return union(*tables).take(first[place])


def fetched_tokens(storage: Storage, found: LiveSegments, keys: Array) -> pa.Table:
    """Return the tokens of some rollouts, unordered; ``keys`` are those of ``rollout_keys``, ascending."""
    parts = [arrow_schema(TOKEN_COLUMNS).empty_table()]
    for segment in with_steps(found.rows, np.unique(keys >> 32).tolist()):
        tables, _ = lines_of_keys(storage, segment, _PLACES, keys)
        if tables:
            parts.append(_tokens_in(storage, segment, keys, union(*tables)))
    return union(*parts)


def _rollouts_of(storage: Storage, found: LiveSegments, step: int) -> int:
    segments = with_steps(found.rows, {step})
    return sum(lines_of_steps(storage, segment, "rows", ["sample"], {step}).num_rows for segment in segments)


def _tokens_in(storage: Storage, segment: Segment, keys: Array, places: pa.Table) -> pa.Table:
    """Return the tokens that one segment has of the rollouts, using their recorded places if there are any."""

    def wanted(tokens: pa.Table) -> pa.Table:
        return tokens.filter(pa.array(np.isin(rollout_keys(tokens), keys)))

    if set(places.column_names) == set(_PLACES) and not any(column.null_count for column in places.columns):
        start, count = (places[name].to_numpy() for name in _PLACES)
        tokens = wanted(lines_at_places(storage, segment, "tokens", start, count))
        if tokens.num_rows == count.sum():
            return tokens
    # An older record lacks the places of the tokens, or rollouts have just been added to the step.
    return wanted(lines_of_steps(storage, segment, "tokens", None, np.unique(keys >> 32).tolist()))
