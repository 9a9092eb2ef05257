"""Expose the record as views of a DuckDB connection."""

import glob
from collections.abc import Sequence
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from cavesson.record.lines import lines_of_steps, tokens_of_rows
from cavesson.record.schema import PLACE_COLUMNS, ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, Column, arrow_schema
from cavesson.record.segments import Kind, LiveSegments, Segment, growing
from cavesson.record.storage import Storage

if TYPE_CHECKING:
    from cavesson.record.reader import Run

DUCKDB = {
    "autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "allow_community_extensions": "false"
}  # fmt: skip
"""Nothing is fetched while a query runs."""
_COLUMNS: dict[Kind, Sequence[Column]] = {
    "rows": (*ROW_COLUMNS, *PLACE_COLUMNS), "tokens": TOKEN_COLUMNS, "steps": STEP_COLUMNS
}  # fmt: skip


def connect(run: "Run", found: LiveSegments, query: str, **config: str) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views that the query may use.

    Args:
        run: Run whose record is read.
        found: The segments of the run to read.
        query: Only views whose names occur here are created, because a view opens every file to read its columns.
        config: DuckDB's settings.

    Raises:
        FileNotFoundError: A compaction has just removed what ``found`` names.
    """
    connection = duckdb.connect(config={**DUCKDB, **config})
    if run.storage.filesystem is not None:
        connection.register_filesystem(run.storage.filesystem)
    wanted = [kind for kind in _COLUMNS if kind in query.lower()]
    grown = _growing(run.storage, found, wanted)
    try:
        for kind in wanted:
            _create_view(connection, run, kind, found.steps if kind == "steps" else found.rows, grown[kind])
    except duckdb.IOException as error:
        raise FileNotFoundError(str(error)) from error
    if "rollups" in query.lower():
        connection.register("rollups", run.rollups())
    if "vocabulary" in query.lower():
        connection.register("vocabulary", run.vocabulary)
    return connection


def _growing(files: Storage, found: LiveSegments, wanted: Sequence[Kind]) -> dict[Kind, list[pa.Table]]:
    """Return the content of the files that may still be replaced.

    DuckDB opens a file once to read its columns and again for every query, and might find a different file then.
    """
    segments = growing(found.rows) if {"rows", "tokens"} & set(wanted) else ()
    rows = [(segment, lines_of_steps(files, segment, "rows", None, None)) for segment in segments]
    tables: dict[Kind, list[pa.Table]] = {"rows": [table for _, table in rows]}
    if "tokens" in wanted:
        tables["tokens"] = [tokens_of_rows(files, segment, table, None, None) for segment, table in rows]
    if "steps" in wanted:
        tables["steps"] = [lines_of_steps(files, segment, "steps", None, None) for segment in growing(found.steps)]
    return tables


def _create_view(
    connection: duckdb.DuckDBPyConnection, run: "Run", kind: Kind, segments: list[Segment], grown: list[pa.Table]
) -> None:
    """Create a view with every declared column, whether or not any file has it."""
    parts = [f"{kind}_declared"]
    connection.register(parts[0], arrow_schema(_COLUMNS[kind]).empty_table())
    open_ones = growing(segments)
    settled = [segment for segment in segments if segment not in open_ones]
    whole = [segment for segment in settled if segment.stop > segment.last]
    cut = [segment for segment in settled if segment.stop <= segment.last]
    for number, (some, stop) in enumerate([(whole, None), *(([segment], segment.stop) for segment in cut)]):
        if some:
            name = f"{kind}_recorded_{number}"
            # DuckDB interprets names as glob patterns.
            paths = [glob.escape(run.storage.path(segment.name(kind))) for segment in some]
            connection.read_parquet(paths, union_by_name=True).create_view(name)
            parts.append(name if stop is None else f"{name} WHERE step < {stop}")
    for number, table in enumerate(grown):
        parts.append(f"{kind}_growing_{number}")
        connection.register(parts[-1], table)
    hidden = f"SELECT * EXCLUDE ({', '.join(c.name for c in PLACE_COLUMNS)})" if kind == "rows" else "SELECT *"
    union = " UNION ALL BY NAME ".join(f"FROM {part}" for part in parts)
    connection.execute(f"CREATE VIEW {kind} AS {hidden} FROM ({union})")
