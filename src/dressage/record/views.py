"""The record as views of a DuckDB connection."""

import glob
from collections.abc import Sequence
from typing import TYPE_CHECKING

import duckdb

from dressage.record.schema import PLACE_COLUMNS, ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, Column, arrow_schema
from dressage.record.segments import Kind, Segment, Snapshot

if TYPE_CHECKING:
    from dressage.record.reader import Run

DUCKDB = {
    "autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "allow_community_extensions": "false"
}  # fmt: skip
"""Nothing is fetched while a query runs."""


def connect(run: "Run", found: Snapshot, query: str, **config: str) -> duckdb.DuckDBPyConnection:
    """Returns a connection with those views that the query can mean.

    Args:
        run: Whose record.
        found: What of it.
        query: A view opens every file to learn its columns, so only those are made that are named here.
        config: DuckDB's settings.
    """
    connection = duckdb.connect(config={**DUCKDB, **config})
    if run.storage.filesystem is not None:
        connection.register_filesystem(run.storage.filesystem)
    views: dict[Kind, tuple[Sequence[Column], list[Segment]]] = {
        "rows": ((*ROW_COLUMNS, *PLACE_COLUMNS), found.rows),
        "tokens": (TOKEN_COLUMNS, found.rows),
        "steps": (STEP_COLUMNS, found.steps),
    }
    for kind, (columns, segments) in views.items():
        if kind in query.lower():
            _create_view(connection, run, kind, columns, segments)
    if "rollups" in query.lower():
        connection.register("rollups", run.rollups())
    if "vocabulary" in query.lower():
        connection.register("vocabulary", run.vocabulary)
    return connection


def _create_view(
    connection: duckdb.DuckDBPyConnection, run: "Run", kind: Kind, columns: Sequence[Column], segments: list[Segment]
) -> None:
    """Creates a view with every declared column, whether or not a file has it."""
    parts = [f"{kind}_declared"]
    connection.register(parts[0], arrow_schema(columns).empty_table())
    whole = [segment for segment in segments if segment.stop > segment.last]
    cut = [segment for segment in segments if segment.stop <= segment.last]
    for number, (some, stop) in enumerate([(whole, None), *(([segment], segment.stop) for segment in cut)]):
        if some:
            name = f"{kind}_recorded_{number}"
            # DuckDB reads names as patterns.
            paths = [glob.escape(run.storage.path(segment.name(kind))) for segment in some]
            connection.read_parquet(paths, union_by_name=True).create_view(name)
            parts.append(name if stop is None else f"{name} WHERE step < {stop}")
    hidden = f"SELECT * EXCLUDE ({', '.join(c.name for c in PLACE_COLUMNS)})" if kind == "rows" else "SELECT *"
    union = " UNION ALL BY NAME ".join(f"FROM {part}" for part in parts)
    connection.execute(f"CREATE VIEW {kind} AS {hidden} FROM ({union})")
