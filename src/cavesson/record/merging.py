"""Write large files from the rows of many segments, step by step, so that only one step is in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cavesson.record.keys import rows_of_tokens
from cavesson.record.precision import Array
from cavesson.record.rollups import ORDER, ROLLUP_SCHEMA, merged, rollups_of
from cavesson.record.schema import PLACE_COLUMNS, arrow_schema
from cavesson.record.segments import Kind, Segment, by_step, file_name, layout, rollups_in, union, with_places
from cavesson.record.storage import Storage

GROUP_LINES: dict[Kind, int] = {"rows": 1024, "tokens": 131_072, "rollups": 8192, "steps": 8192}
"""Lines that are compressed together: the least that has to be read to get at one of them."""
GROUP_BYTES = 32 << 20
"""A group ends earlier when its lines are as large as this."""
LEVEL, FAST = 9, 1
"""Of zstd. What is merged is worth more time; what is written at once, by an import, takes 3 % more room."""


def write_large(files: Storage, stem: str, rows: pa.Table, tokens: pa.Table) -> None:
    """Write rollouts that are already sorted as one segment, with fast compression."""
    tables: dict[Kind, pa.Table] = {"tokens": tokens, "rollups": rollups_of(rows, tokens).sort_by(ORDER), "rows": rows}
    for kind, table in tables.items():
        with _writing(files, kind, stem, table.schema, FAST) as writer:
            writer.add(table)


def merge_rollouts(files: Storage, segments: Sequence[Segment], stem: str, go_on: Callable[[], None]) -> int:
    """Write the rollouts of several segments as one and return their number; ``go_on`` is called before each step."""
    schema = _common(files, "rows", segments)
    places = [arrow_schema(PLACE_COLUMNS).field(column.name) for column in PLACE_COLUMNS]
    schema = pa.schema([*(field for field in schema if field.name not in {p.name for p in places}), *places])
    token_schema = _common(files, "tokens", segments)
    tokens_ahead = _Ahead(_merged(files, segments, "tokens"), token_schema)
    with _writing(files, "tokens", stem, token_schema) as tokens_out, _writing(files, "rows", stem, schema) as rows_out:
        for step, rows in _merged(files, segments, "rows"):
            go_on()
            rows, tokens = in_order(rows, tokens_ahead.take(step), tokens_out.lines)
            tokens_out.add(tokens)
            rows_out.add(rows)
    with _writing(files, "rollups", stem, ROLLUP_SCHEMA) as out:
        out.add(merged(union(*(_rollups(files, segment) for segment in segments))))
    return rows_out.lines


def _rollups(files: Storage, segment: Segment) -> pa.Table:
    """Return a segment's roll-ups, computed again if a write that failed left those of rollouts without rows."""
    found = rollups_in(files, segment)
    rewards = found.filter(pc.and_(pc.equal(found["level"], "row"), pc.equal(found["column"], "reward")))
    rows, tokens = (files.parquet(segment.name(kind)) for kind in ("rows", "tokens"))
    if pc.sum(pc.add(rewards["count"], rewards["not_finite"])).as_py() == rows.metadata.num_rows:
        return found
    return rollups_of(rows.read(), tokens.read())


def merge_steps(files: Storage, segments: Sequence[Segment], stem: str) -> int:
    """Write the metrics of several segments as one segment and return the number of steps."""
    table = union(*(files.parquet(segment.name("steps")).read() for segment in segments)).sort_by("step")
    with _writing(files, "steps", stem, table.schema) as out:
        out.add(table)
    return int(table.num_rows)


def in_order(rows: pa.Table, tokens: pa.Table, start: int = 0) -> tuple[pa.Table, pa.Table]:
    """Return rows sorted by step, group and sample, and their tokens in the same order.

    Args:
        rows: Rows to sort.
        tokens: Their tokens; tokens without a row are dropped.
        start: Line number of the first token in the tokens file.
    """
    keys = [rows[name].to_numpy() for name in ("sample", "step")]
    if "group" in rows.column_names:
        keys.insert(1, pc.fill_null(rows["group"], -1).to_numpy())
    rows = _taken(rows, np.lexsort(keys))
    line, known = rows_of_tokens(rows, tokens)
    if not known.all():
        tokens, line = tokens.filter(pa.array(known)), line[known]
    if not _ascending(line, tokens["position"].to_numpy()):
        tokens = tokens.take(np.lexsort([tokens["position"].to_numpy(), line]))
    count = np.bincount(line, minlength=rows.num_rows)
    return with_places(rows, start + np.cumsum(count) - count, count), tokens


def _taken(table: pa.Table, order: Array) -> pa.Table:
    """Return the rows in this order, without copying if they already have it, which is the usual case."""
    return table if np.array_equal(order, np.arange(len(order))) else table.take(order)


def _ascending(line: Array, position: Array) -> bool:
    further = np.diff(line)
    return bool(np.all((further > 0) | ((further == 0) & (np.diff(position) >= 0))))


def _common(files: Storage, kind: Kind, segments: Sequence[Segment]) -> pa.Schema:
    schemas = [files.parquet(segment.name(kind)).schema_arrow for segment in segments]
    return pa.unify_schemas(schemas, promote_options="permissive")


def _merged(files: Storage, segments: Sequence[Segment], kind: Kind) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of all segments step by step; each file is opened when its first step is reached."""
    waiting = sorted(segments, key=lambda segment: segment.first, reverse=True)
    reading: list[_Ahead] = []
    while waiting or reading:
        step = min([stream.step for stream in reading if stream.step is not None] + [s.first for s in waiting[-1:]])
        while waiting and waiting[-1].first == step:
            reading.append(_Ahead(by_step(files, waiting.pop(), kind)))
        found = [stream.take(step) for stream in reading if stream.step == step]
        reading = [stream for stream in reading if stream.step is not None]
        if found:
            yield step, union(*found)


class _Ahead:
    """A stream of steps with one step of lookahead.

    Args:
        stream: Steps and their rows, ascending.
        schema: Schema of the empty table returned for a step that the stream lacks.
    """

    def __init__(self, stream: Iterator[tuple[int, pa.Table]], schema: pa.Schema | None = None) -> None:
        self._stream = stream
        self._schema = schema
        self._next = next(stream, None)

    @property
    def step(self) -> int | None:
        return None if self._next is None else self._next[0]

    def take(self, step: int) -> pa.Table:
        """Return the rows of a step and advance to the next one, skipping any earlier steps."""
        while self._next is not None and self._next[0] < step:
            self._next = next(self._stream, None)
        if self._next is None or self._next[0] > step:
            assert self._schema is not None
            return self._schema.empty_table()
        found = self._next[1]
        self._next = next(self._stream, None)
        return found


@contextmanager
def _writing(
    files: Storage, kind: Kind, stem: str, schema: pa.Schema, level: int = LEVEL
) -> Iterator["_RowGroupWriter"]:
    """Write one file, which becomes visible when the block ends."""
    with (
        files.writing(file_name(kind, stem)) as file,
        pq.ParquetWriter(file, schema, **layout(schema, level)) as parquet,
    ):
        writer = _RowGroupWriter(parquet, GROUP_LINES[kind])
        yield writer
        writer.finish()


class _RowGroupWriter:
    """Collects rows into row groups of the same size."""

    def __init__(self, parquet: pq.ParquetWriter, group: int) -> None:
        self.lines = 0
        self._parquet = parquet
        self._group = group
        self._added: list[pa.Table] = []
        self._added_lines = self._added_bytes = 0
        self._waiting = parquet.schema.empty_table()

    def add(self, table: pa.Table) -> None:
        table = _conformed(table, self._parquet.schema)
        self.lines += table.num_rows
        self._added.append(table)
        # A table of many small pieces takes long to measure and to cut: only whole groups are gathered.
        self._added_lines += table.num_rows
        self._added_bytes += table.nbytes
        if self._added_lines >= self._group or self._added_bytes > GROUP_BYTES:
            self._gather()
            while self._waiting.num_rows >= (group := self._size()):
                self._write(group)
            self._added_lines, self._added_bytes = self._waiting.num_rows, self._waiting.nbytes

    def finish(self) -> None:
        self._gather()
        while self._waiting.num_rows:
            self._write(self._size())

    def _gather(self) -> None:
        self._waiting, self._added = pa.concat_tables([self._waiting, *self._added]), []

    def _write(self, group: int) -> None:
        self._parquet.write_table(self._waiting.slice(0, group), row_group_size=group)
        self._waiting = self._waiting.slice(group)

    def _size(self) -> int:
        """Return the number of rows of the next group."""
        first = self._waiting.slice(0, self._group)
        if first.nbytes <= GROUP_BYTES:
            return self._group
        size = np.array([self._waiting.slice(i, 1).nbytes for i in range(first.num_rows)])
        return max(int(np.searchsorted(np.cumsum(size), GROUP_BYTES)), 1)


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the schema's columns; absent columns are filled with null."""
    if table.schema.equals(schema):
        return table
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)
