"""What a query can ask a run for: its tables, the columns that have values, what they mean, and examples."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.board.column_texts import translations
from cavesson.board.runs import Board, OpenRun, reading
from cavesson.board.selection import RunQuery
from cavesson.board.sql import MAX_LINES, MEMORY, SECONDS
from cavesson.board.sql_examples import examples
from cavesson.index.snapshot import Snapshot
from cavesson.record.rescored import SCHEMA as RESCORED
from cavesson.record.rollups import ROLLUP_SCHEMA
from cavesson.record.schema import ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, arrow_schema
from cavesson.record.segments import Kind, Segment
from cavesson.record.splits import HELD_OUT

DECLARED: dict[Kind, pa.Schema] = {
    "rows": arrow_schema(ROW_COLUMNS), "tokens": arrow_schema(TOKEN_COLUMNS), "turns": arrow_schema(TURN_COLUMNS)
}  # fmt: skip
SEGMENTS, LINES = 4, 256
"""Segments, and the lines of each, in which values are looked for."""
OF_ROLLUPS = {
    "step": "as in rows",
    "split": "as in rows",
    "level": "row: the column is one of rows, a part of the reward, or gap; token: one of tokens",
    "column": "the column that the line summarises",
    "count": "number of finite values",
    "not_finite": "number of NaN and infinite values",
    "sum": "sum of the values",
    "sum_squares": "sum of their squares",
    "min": "the smallest value",
    "max": "the largest value",
    "sketch_keys": "bins of the distribution of the values",
    "sketch_counts": "number of values in each of these bins",
    "bin_counts": "number of values at positions 0 to 7, 8 to 15, …",
    "bin_sums": "sum of the values at these positions",
}
OF_VOCABULARY = {
    "token_id": "id in the vocabulary",
    "token": "the tokenizer's own string",
    "text": "the token as text",
}
NAME = "name under which the rewards were computed again"


class Column(NamedTuple):
    """A column as the page lists it."""

    name: str
    type: str
    doc: str
    """Its meaning in English; empty for a metric."""


def tables(board: Board, query: RunQuery) -> dict[str, Any]:
    """Return the tables of a run, their columns that have values with type and meaning, examples, and the limits.

    ``doc`` is the meaning by language. It is empty for a metric that the trainer logs. Values are looked for at the
    beginning of a few files of the record, and in the index.
    """
    run = board.run(query.run)
    found = _found(run)
    held_out = run.snapshot().count(HELD_OUT) > 0
    shown = examples({name: [column.name for column in columns] for name, columns in found.items()}, held_out)
    return {
        "tables": [{"name": name, "columns": [_shown(one) for one in columns]} for name, columns in found.items()],
        "examples": [one._asdict() for one in shown],
        "limits": {"seconds": SECONDS, "memory": MEMORY, "lines": MAX_LINES},
    }


def _shown(column: Column) -> dict[str, Any]:
    return column._asdict() | {"doc": {"en": column.doc} | translations(column.doc) if column.doc else {}}


def _found(run: OpenRun) -> dict[str, list[Column]]:
    """Return the columns with values of every table that has any."""
    snapshot, vocabulary = run.snapshot(), run.record.vocabulary
    found: dict[str, list[Column]] = {}
    with reading():
        for kind, schema in DECLARED.items():
            measured = _measured(run, kind) | (set(snapshot.names) if kind == "rows" else set())
            found[kind] = [column for column in _documented(schema) if column.name in measured]
        found["steps"] = _of_steps(snapshot)
    found["vocabulary"] = _columns(OF_VOCABULARY, vocabulary.schema) if vocabulary.num_rows else []
    if found["rows"]:
        found["rollups"] = _columns(OF_ROLLUPS, ROLLUP_SCHEMA)
    if found["rows"] and snapshot.state.rescored:
        found["rescored"] = [Column("name", "string", NAME), *_documented(RESCORED)]
    return {name: columns for name, columns in found.items() if columns}


def _documented(schema: pa.Schema) -> list[Column]:
    return [Column(field.name, str(field.type), field.metadata[b"doc"].decode()) for field in schema]


def _columns(docs: Mapping[str, str], schema: pa.Schema) -> list[Column]:
    return [Column(name, str(schema.field(name).type), doc) for name, doc in docs.items()]


def _of_steps(snapshot: Snapshot) -> list[Column]:
    """Return the columns of the table of metrics; of a run without metrics, none."""
    docs = {column.name: column.doc for column in STEP_COLUMNS}
    found = [Column(one.name, str(one.type), docs.get(one.name, "")) for one in snapshot.metrics.schema]
    return found if any(column.name not in docs for column in found) else []


def _measured(run: OpenRun, kind: Kind) -> set[str]:
    """Return the columns of rows, tokens or turns that have a value at the beginning of some segments."""

    def look(live: Any) -> set[str]:
        parts = [run.record.read(one, kind, count=LINES) for one in _some(live.rows)]
        return {name for part in parts for name in part.column_names if _has_value(part[name])}

    return run.record.consistent(look)


def _some(segments: list[Segment]) -> Iterable[Segment]:
    """Return a few segments, evenly spread from the first to the last."""
    last = len(segments) - 1
    return [segments[at] for at in sorted({last * i // (SEGMENTS - 1) for i in range(SEGMENTS)})] if segments else []


def _has_value(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.invert(column.is_null(nan_is_null=True))).as_py())
