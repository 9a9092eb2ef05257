"""Write large files from the rows of many segments, step by step, so that only one step is in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cavesson.record.former_names import current
from cavesson.record.keys import rows_of_tokens
from cavesson.record.lines import has_turns
from cavesson.record.precision import Array
from cavesson.record.rollups import ORDER, ROLLUP_SCHEMA, merged, rollups_of
from cavesson.record.schema import PLACE_COLUMNS, TOKEN_PLACES, TURN_PLACES, arrow_schema
from cavesson.record.segments import (
    Kind,
    Segment,
    by_step,
    file_name,
    layout,
    rollups_in,
    union,
    with_places,
    without_places,
)
from cavesson.record.storage import Storage
from cavesson.record.tables import NO_TURNS, Tables

GROUP_LINES: dict[Kind, int] = {"rows": 1024, "tokens": 131_072, "turns": 4096, "rollups": 8192, "steps": 8192}
"""Lines that are compressed together: the least that has to be read to get at one of them."""
GROUP_BYTES = 32 << 20
"""A group ends earlier when its lines are as large as this."""
LEVEL, FAST = 9, 1
"""Of zstd. What is merged is worth more time; what is written at once, by an import, takes 3 % more room."""


def write_large(files: Storage, stem: str, tables: Tables) -> None:
    """Write rollouts that are already sorted as one segment, with fast compression."""
    rows, tokens, turns = tables
    parts: dict[Kind, pa.Table] = {"tokens": tokens, "turns": turns, "rollups": rollups_of(rows, tokens).sort_by(ORDER)}
    if not len(turns):
        del parts["turns"]
    for kind, table in {**parts, "rows": rows}.items():
        with _writing(files, kind, stem, table.schema, FAST) as writer:
            writer.add(table)


def merge_rollouts(files: Storage, segments: Sequence[Segment], stem: str, go_on: Callable[[], None]) -> int:
    """Write the rollouts of several segments as one and return their number; ``go_on`` is called before each step."""
    with_turns = [segment for segment in segments if has_turns(files, segment)]
    schema = _with_all_places(_common(files, "rows", segments), with_turns=bool(with_turns))
    token_schema = _common(files, "tokens", segments)
    turn_schema = _common(files, "turns", with_turns)
    tokens_ahead = _Ahead(_merged(files, segments, "tokens"), token_schema)
    turns_ahead = _Ahead(_merged(files, with_turns, "turns"), turn_schema)
    with (
        _writing(files, "tokens", stem, token_schema) as tokens_out,
        _writing(files, "turns", stem, turn_schema) if with_turns else nullcontext() as turns_out,
        _writing(files, "rows", stem, schema) as rows_out,
    ):
        for step, rows in _merged(files, segments, "rows"):
            go_on()
            start = (tokens_out.lines, turns_out.lines if turns_out else 0)
            rows, tokens, turns = in_order(Tables(rows, tokens_ahead.take(step), turns_ahead.take(step)), start)
            tokens_out.add(tokens)
            if turns_out:
                turns_out.add(turns)
            rows_out.add(rows)
    with _writing(files, "rollups", stem, ROLLUP_SCHEMA) as out:
        out.add(merged(union(*(_rollups(files, segment) for segment in segments))))
    return rows_out.lines


def _with_all_places(schema: pa.Schema, with_turns: bool) -> pa.Schema:
    """Return a schema of rows that ends with their places in the other files."""
    places = arrow_schema((*TOKEN_PLACES, *TURN_PLACES) if with_turns else TOKEN_PLACES)
    names = {column.name for column in PLACE_COLUMNS}
    return pa.schema([*(field for field in schema if field.name not in names), *places])


def _rollups(files: Storage, segment: Segment) -> pa.Table:
    """Return a segment's roll-ups, computed again if a write that failed left those of rollouts without rows."""
    found = rollups_in(files, segment)
    rewards = found.filter(pc.and_(pc.equal(found["level"], "row"), pc.equal(found["column"], "reward")))
    rows, tokens = (files.parquet(segment.name(kind)) for kind in ("rows", "tokens"))
    if pc.sum(pc.add(rewards["count"], rewards["not_finite"])).as_py() == rows.metadata.num_rows:
        return found
    return rollups_of(rows.read(), current(tokens.read()))


def merge_steps(files: Storage, segments: Sequence[Segment], stem: str) -> int:
    """Write the metrics of several segments as one segment and return the number of steps."""
    table = union(*(files.parquet(segment.name("steps")).read() for segment in segments)).sort_by("step")
    with _writing(files, "steps", stem, table.schema) as out:
        out.add(table)
    return int(table.num_rows)


def in_order(tables: Tables, start: tuple[int, int] = (0, 0)) -> Tables:
    """Return rows sorted by step, group and sample, and their tokens and turns in the same order.

    Tokens and turns without a row are dropped. ``start`` is the line of the first token, and of the first turn, in its
    file.
    """
    rows = without_places(tables.rows)
    keys = [rows[name].to_numpy() for name in ("sample", "step")]
    if "group" in rows.column_names:
        keys.insert(1, pc.fill_null(rows["group"], -1).to_numpy())
    rows = _taken(rows, np.lexsort(keys))
    tokens, token_count = _of_rows(rows, tables.tokens, "position")
    turns, turn_count = _of_rows(rows, tables.turns, "turn")
    rows = with_places(rows, TOKEN_PLACES, start[0], token_count)
    return Tables(with_places(rows, TURN_PLACES, start[1], turn_count) if len(turns) else rows, tokens, turns)


def _of_rows(rows: pa.Table, lines: pa.Table, order: str) -> tuple[pa.Table, Array]:
    """Return the lines that have a row, in the order of the rows and of a column, and [N] how many each row has."""
    line, known = rows_of_tokens(rows, lines)
    if not known.all():
        lines, line = lines.filter(pa.array(known)), line[known]
    if not _ascending(line, lines[order].to_numpy()):
        lines = lines.take(np.lexsort([lines[order].to_numpy(), line]))
    return lines, np.bincount(line, minlength=rows.num_rows)


def _taken(table: pa.Table, order: Array) -> pa.Table:
    """Return the rows in this order, without copying if they already have it, which is the usual case."""
    return table if np.array_equal(order, np.arange(len(order))) else table.take(order)


def _ascending(line: Array, position: Array) -> bool:
    further = np.diff(line)
    return bool(np.all((further > 0) | ((further == 0) & (np.diff(position) >= 0))))


def _common(files: Storage, kind: Kind, segments: Sequence[Segment]) -> pa.Schema:
    schemas = [files.parquet(segment.name(kind)).schema_arrow for segment in segments]
    schemas = [current(schema.empty_table()).schema for schema in schemas] if kind == "tokens" else schemas
    return pa.unify_schemas(schemas or [NO_TURNS.schema], promote_options="permissive")


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
    """A stream of ascending steps and their rows, with one step of lookahead.

    For a step that the stream lacks, it returns an empty table of the schema.
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
