"""Expose the record as views of a DuckDB connection."""

import glob
from collections.abc import Callable, Mapping, Sequence

import duckdb
import pyarrow as pa

from cavesson.record.former_names import FORMER
from cavesson.record.lines import has_turns, lines_of_rows, lines_of_steps
from cavesson.record.read.fetching import OF_ROLLOUT
from cavesson.record.schema import (
    PLACE_COLUMNS,
    ROW_COLUMNS,
    STEP_COLUMNS,
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    Column,
    arrow_schema,
)
from cavesson.record.segments import Kind, LiveSegments, Segment, growing
from cavesson.record.storage import Storage

DUCKDB = {
    "autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "allow_community_extensions": "false"
}  # fmt: skip
"""Nothing is fetched while a query runs."""
_COLUMNS: dict[Kind, Sequence[Column]] = {
    "rows": (*ROW_COLUMNS, *PLACE_COLUMNS), "tokens": TOKEN_COLUMNS, "turns": TURN_COLUMNS, "steps": STEP_COLUMNS
}  # fmt: skip


def connect(
    files: Storage, live: LiveSegments, query: str, computed: Mapping[str, Callable[[], pa.Table]], **config: str
) -> duckdb.DuckDBPyConnection:
    """Return a connection with the views of these segments that the query may use, and DuckDB's settings.

    Only views whose names occur in the query are created, because a view opens every file to read its columns.
    ``computed`` are the tables of the run that no file has as they are.

    Raises:
        FileNotFoundError: A compaction has just removed what ``live`` names.
    """
    connection = duckdb.connect(config={**DUCKDB, **config})
    if files.filesystem is not None:
        connection.register_filesystem(files.filesystem)
    wanted = [kind for kind in _COLUMNS if kind in query.lower()]
    grown = _growing(files, live, wanted)
    try:
        for kind in wanted:
            _create_view(connection, files, kind, live, grown[kind])
    except duckdb.IOException as error:
        raise FileNotFoundError(str(error)) from error
    for name, table in computed.items():
        if name in query.lower():
            connection.register(name, table())
    return connection


def _growing(files: Storage, live: LiveSegments, wanted: Sequence[Kind]) -> dict[Kind, list[pa.Table]]:
    """Return the content of the files that may still be replaced.

    DuckDB opens a file once to read its columns and again for every query, and might find a different file then.
    """
    segments = growing(live.rows) if set(wanted) - {"steps"} else ()
    rows = [(segment, lines_of_steps(files, segment, "rows", None, None)) for segment in segments]
    tables: dict[Kind, list[pa.Table]] = {"rows": [table for _, table in rows]}
    for kind in OF_ROLLOUT.keys() & set(wanted):
        tables[kind] = [lines_of_rows(files, segment, kind, table, None, None) for segment, table in rows]
    if "steps" in wanted:
        tables["steps"] = [lines_of_steps(files, segment, "steps", None, None) for segment in growing(live.steps)]
    return tables


def files_of(files: Storage, live: LiveSegments, kind: Kind) -> list[Segment]:
    """Return the segments that have a file of a kind and can no longer grow."""
    segments = live.steps if kind == "steps" else live.rows
    open_ones = growing(segments)
    settled = [segment for segment in segments if segment not in open_ones]
    return [segment for segment in settled if kind != "turns" or has_turns(files, segment)]


def _create_view(
    connection: duckdb.DuckDBPyConnection, files: Storage, kind: Kind, live: LiveSegments, grown: list[pa.Table]
) -> None:
    """Create a view with every declared column, whether or not any file has it."""
    parts = [f"{kind}_declared"]
    connection.register(parts[0], arrow_schema(_COLUMNS[kind]).empty_table())
    settled = files_of(files, live, kind)
    whole = [segment for segment in settled if segment.stop > segment.last]
    cut = [segment for segment in settled if segment.stop <= segment.last]
    for number, (some, stop) in enumerate([(whole, None), *(([segment], segment.stop) for segment in cut)]):
        if some:
            name = f"{kind}_recorded_{number}"
            # DuckDB interprets names as glob patterns.
            paths = [glob.escape(files.path(segment.name(kind))) for segment in some]
            _current(connection.read_parquet(paths, union_by_name=True), kind).create_view(name)
            parts.append(name if stop is None else f"{name} WHERE step < {stop}")
    for number, table in enumerate(grown):
        parts.append(f"{kind}_growing_{number}")
        connection.register(parts[-1], table)
    hidden = f"SELECT * EXCLUDE ({', '.join(c.name for c in PLACE_COLUMNS)})" if kind == "rows" else "SELECT *"
    union = " UNION ALL BY NAME ".join(f"FROM {part}" for part in parts)
    connection.execute(f"CREATE VIEW {kind} AS {hidden} FROM ({union})")


def _current(recorded: duckdb.DuckDBPyRelation, kind: Kind) -> duckdb.DuckDBPyRelation:
    """Return recorded lines with the present names of the columns of tokens."""
    for name, now in FORMER.items() if kind == "tokens" else ():
        if name in recorded.columns:
            both = f"coalesce({now}, {name})" if now in recorded.columns else name
            others = ", ".join({name, now} & set(recorded.columns))
            recorded = recorded.project(f"* EXCLUDE ({others}), {both} AS {now}")
    return recorded
