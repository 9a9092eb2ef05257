"""Read selected rows of a segment's files, and only the row groups that contain them."""

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cavesson.record.former_names import current, names_in
from cavesson.record.keys import rows_of_tokens
from cavesson.record.precision import Array
from cavesson.record.segments import Kind, Segment
from cavesson.record.storage import Storage
from cavesson.record.tables import NO_TURNS

PARTS = 16
"""Parts of a row group of which the last ones are not decoded if they are not needed."""


def lines_of_steps(
    files: Storage, segment: Segment, kind: Kind, columns: Sequence[str] | None, steps: Collection[int] | None
) -> pa.Table:
    """Return the rows of some steps that no later attempt superseded, in file order.

    Of the columns, those that the file has are returned. None = all columns, or all steps.
    """
    file = open_file(files, segment, kind)
    groups = _groups(file, steps, segment.stop)
    whole = steps is None and segment.stop > segment.last
    table = _read(file, kind, groups, None if columns is None else {*columns, "step"})
    if not whole:
        step = table["step"].to_numpy()
        there = step < segment.stop if steps is None else (step < segment.stop) & np.isin(step, np.array(list(steps)))
        table = table.filter(pa.array(there))
    return table if columns is None or "step" in columns else table.drop_columns("step")


def lines_of_rows(
    files: Storage,
    segment: Segment,
    kind: Kind,
    rows: pa.Table,
    columns: Sequence[str] | None,
    steps: Collection[int] | None,
) -> pa.Table:
    """Return the tokens or turns of some steps of a growing segment, which are written before their rows.

    They count only if their row is among ``rows``, which have ``turn_count`` if the file has it. ``columns`` include
    ``step`` and ``sample``. None = all columns, or all steps.
    """
    if kind == "turns" and "turn_count" not in rows.column_names:
        return NO_TURNS if columns is None else NO_TURNS.select(columns)
    lines = lines_of_steps(files, segment, kind, columns, steps)
    return lines.filter(pa.array(rows_of_tokens(rows, lines)[1]))


def has_turns(files: Storage, segment: Segment) -> bool:
    """Return whether a segment has a file of turns; only some have."""
    return "turn_count" in open_file(files, segment, "rows").schema_arrow.names


def lines_at(
    files: Storage, segment: Segment, kind: Kind, columns: Sequence[str] | None, start: int, count: int | None
) -> pa.Table:
    """Return ``count`` rows from ``start`` on, or all from there if ``count`` is None."""
    file = open_file(files, segment, kind)
    bounds = np.cumsum([0, *(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))])
    end = int(bounds[-1]) if count is None else min(start + count, int(bounds[-1]))
    groups = [group for group in range(file.num_row_groups) if bounds[group] < end and bounds[group + 1] > start]
    offset = start - int(bounds[groups[0]]) if groups else 0
    return _read(file, kind, groups, columns).slice(offset, max(end - start, 0))


def lines_at_places(files: Storage, segment: Segment, kind: Kind, start: Array, count: Array) -> pa.Table:
    """Return the rows at some places, ``count`` [N] rows from each ``start`` [N] on, each row and row group once."""
    file = open_file(files, segment, kind)
    before = np.cumsum(count) - count
    lines = np.unique(np.arange(int(count.sum())) + np.repeat(start - before, count))
    parts, first = [_read(file, kind, [], None)], 0
    for group in range(file.num_row_groups):
        end = first + file.metadata.row_group(group).num_rows
        inside = lines[np.searchsorted(lines, first) : np.searchsorted(lines, end)] - first
        if len(inside):
            between = _first(file, group, int(inside[-1]) + 1).slice(inside[0], int(inside[-1] - inside[0]) + 1)
            between = current(between) if kind == "tokens" else between
            parts.append(between if len(between) == len(inside) else between.take(inside - inside[0]))
        first = end
    return pa.concat_tables(parts)


def lines_of_keys(
    files: Storage, segment: Segment, columns: Sequence[str], wanted: Array
) -> tuple[list[pa.Table], list[Array]]:
    """Return rows by key, from each row group that has any: the rows, and their indices in ``wanted``.

    ``wanted`` are keys as returned by ``rollout_keys``, ascending. Of the columns, those that the file has are
    returned.
    """
    file = open_file(files, segment, "rows")
    steps = np.unique(wanted >> 32).tolist()
    names = [name for name in file.schema_arrow.names if name in columns]
    tables, found = [], []
    for group in _groups(file, steps, segment.stop):
        keys = file.read_row_group(group, ["step", "sample"])
        step = keys["step"].to_numpy().astype(np.int64)
        key = (step << 32) + keys["sample"].to_numpy()
        at = np.minimum(np.searchsorted(wanted, key), len(wanted) - 1)
        lines = np.flatnonzero((wanted[at] == key) & (step < segment.stop))
        if len(lines):
            tables.append(_first(file, group, int(lines[-1]) + 1, names).take(lines))
            found.append(at[lines])
    return tables, found


def _first(file: pq.ParquetFile, group: int, count: int, columns: list[str] | None = None) -> pa.Table:
    """Return the first ``count`` rows of a row group, or somewhat more; most of what comes behind is not decoded."""
    size = file.metadata.row_group(group).num_rows // PARTS + 1
    batches: list[pa.RecordBatch] = []
    for batch in file.iter_batches(size, [group], columns):
        batches.append(batch)
        if sum(map(len, batches)) >= count:
            break
    return pa.Table.from_batches(batches)


def _read(file: pq.ParquetFile, kind: Kind, groups: list[int], columns: Collection[str] | None) -> pa.Table:
    """Return the rows of some row groups, and of the columns those that the file has; None = all."""
    if kind != "tokens":
        names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        return file.read_row_groups(groups, names)
    names = None if columns is None else names_in(file.schema_arrow.names, columns)
    return current(file.read_row_groups(groups, names))


def open_file(files: Storage, segment: Segment, kind: Kind) -> pq.ParquetFile:
    """Open a file of a segment; the metadata of compacted segments, which never change, is cached."""
    metadata = _metadata(files, segment.name(kind)) if segment.compacted else None
    return files.parquet(segment.name(kind), metadata)


@lru_cache(maxsize=256)
def _metadata(files: Storage, name: str) -> pq.FileMetaData:
    return files.parquet(name).metadata


def _groups(file: pq.ParquetFile, steps: Collection[int] | None, stop: int) -> list[int]:
    """Return the row groups that can contain these steps before ``stop``, according to the file's statistics."""
    metadata = file.metadata
    column = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "step")
    wanted = None if steps is None else np.unique(np.array([step for step in steps if step < stop], np.int64))
    found = []
    for group in range(file.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        if statistics is None or not statistics.has_min_max or _overlap(statistics.min, statistics.max, wanted, stop):
            found.append(group)
    return found


def _overlap(first: int, last: int, wanted: Array | None, stop: int) -> bool:
    if wanted is None:
        return first < stop
    at = int(np.searchsorted(wanted, first))
    return at < len(wanted) and bool(wanted[at] <= last)
