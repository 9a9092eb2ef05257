"""Read the databases of trackio, ``PROJECT.db``: what a run has logged, its tables and its traces.

Source: https://github.com/gradio-app/trackio.

A database has a line per call of ``log``: the run's name, the count of the call, and JSON of what was logged, in which
a table is ``{"_type": "trackio.table", "_value": [{…}, …]}``. Traces are in a table of their own. A database is read as
a folder: ``PROJECT.db/RUN/KEY`` has the tables or the traces that a run has logged under a key.
"""

import json
import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from cavesson.text.counting import some_of

DATABASE = ".db"
TABLE = "trackio.table"
FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""What trackio writes in place of numbers that JSON does not have."""


class Inside(NamedTuple):
    """A place in a database."""

    file: Path
    run: str | None = None
    key: str | None = None


def inside(path: Path) -> Inside | None:
    """Return the place in a database that a path names; None if it is not one."""
    file = next((one for one in (path, *path.parents) if one.suffix == DATABASE and one.is_file()), None)
    return None if file is None else Inside(file, *map(unquote, path.relative_to(file).parts[:2]))


def within(file: Path, *names: str) -> Path:
    """Return the path of a run, or of one of its keys, in a database: ``/`` in a name is ``%2F``."""
    quoted = (name.replace("%", "%25").replace("/", "%2F") for name in names)
    return file.joinpath(*(f"%2E{name[1:]}" if name.startswith(".") else name for name in quoted))


def runs_in(file: Path) -> list[str]:
    """Return the names of the runs of a database, in the order in which they began.

    Raises:
        ValueError: It cannot be read, or is not one of trackio.
    """
    with closing(_connected(file)) as database:
        found = _selected(database, "SELECT run_name FROM metrics GROUP BY run_name ORDER BY MIN(id)")
        return [str(name) for (name,) in found]


def places_in(path: Path) -> list[Path]:
    """Return the places of the tables and traces in a database, or in one of its runs; none if it cannot be read."""
    place = inside(path)
    if place is None:
        return []
    try:
        runs = [place.run] if place.run is not None else runs_in(place.file)
        keys = {run: dict.fromkeys(key for key, _ in _records(place.file, run)) for run in runs}
    except ValueError:
        return []
    return [within(place.file, run, key) for run in runs for key in keys[run] if place.key in (None, key)]


def database_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of the tables, or the traces, at a place in a database; each has the ``step`` of its log.

    Raises:
        ValueError: The database cannot be read.
    """
    place = inside(path)
    if place is None or place.run is None:
        raise ValueError("it is no longer in the database")
    yield from (row for key, row in _records(place.file, place.run) if place.key in (None, key))


def logged_in(file: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield what a run has logged; ``_step`` counts the calls of ``log``.

    Raises:
        ValueError: The database cannot be read.
    """
    for step, logged in _logs(file, run):
        yield {"_step": step, **logged}


def nothing_in(path: Path) -> str:
    """Return why a place in a database has no rollouts: what is there instead, or that it cannot be read."""
    place = inside(path)
    if place is None:
        return "it is not a database"
    try:
        runs = runs_in(place.file)
        for run in runs:
            deque(_records(place.file, run), maxlen=0)  # reads everything
    except ValueError as error:
        return f"it cannot be read as a database of trackio: {error}"
    if place.run is not None and place.run not in runs:
        return f"{place.file} has no run {place.run!r}: it has {some_of(runs)}"
    return "it has no tables and no traces; its metrics are read with --metrics" if runs else "it has no runs"


def _records(file: Path, run: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of tables and the traces of a run, with the key under which each was logged."""
    for step, logged in _logs(file, run, f"instr(metrics, '{TABLE}')"):
        for key, value in logged.items():
            if isinstance(value, Mapping) and value.get("_type") == TABLE and isinstance(value.get("_value"), list):
                yield from ((key, {"step": step} | row) for row in _with_numbers(value["_value"]))
    with closing(_connected(file)) as database:
        names = {name for _, name, *_ in _selected(database, "PRAGMA table_info(traces)")}
        wanted = [name for name in ("id", "step", "key", "messages", "metadata", "spans") if name in names]
        if not wanted:
            return  # a database of an earlier version
        query = f"SELECT {', '.join(wanted)} FROM traces WHERE run_name = ? ORDER BY rowid"
        for values in _selected(database, query, run):
            row = dict(zip(wanted, values, strict=True))
            for name in ("messages", "metadata", "spans"):
                if row.get(name) is not None:
                    row[name] = _parsed(row[name])
            yield str(row["key"]), row


def _logs(file: Path, run: str, condition: str = "TRUE") -> Iterator[tuple[int, dict[str, Any]]]:
    query = f"SELECT step, metrics FROM metrics WHERE run_name = ? AND {condition} ORDER BY id"
    with closing(_connected(file)) as database:
        for step, text in _selected(database, query, run):
            logged = _parsed(text)
            if isinstance(logged, dict):
                yield step, logged


def _with_numbers(rows: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table with numbers where trackio wrote a text in place of one."""
    objects = [row if isinstance(row, dict) else {"row": row} for row in rows]
    names = {name for row in objects for name in row}
    numbers = {name for name in names if all(_is_number(row.get(name)) for row in objects)}
    for row in objects:
        yield {name: FLOATS[value] if name in numbers and value in FLOATS else value for name, value in row.items()}


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or (isinstance(value, str) and value in FLOATS)


def _connected(file: Path) -> sqlite3.Connection:
    """Open a database to read; no file is made beside it unless it is being written."""
    is_written = file.with_name(file.name + "-wal").exists()
    place = f"{file.resolve().as_uri()}?mode=ro{'' if is_written else '&immutable=1'}"
    try:
        return sqlite3.connect(place, uri=True)
    except sqlite3.Error as error:
        raise ValueError(str(error)) from error


def _selected(database: sqlite3.Connection, query: str, *values: str) -> Iterable[tuple[Any, ...]]:
    try:
        yield from database.execute(query, values)
    except sqlite3.Error as error:
        raise ValueError(str(error)) from error


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply to be read") from None
