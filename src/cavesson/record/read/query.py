"""Run a read-only query over a record in a separate process with limits.

DuckDB may open only the run's own files; it downloads nothing, and the query cannot change its configuration. A process
that exceeds its time or memory limit is ended. `python -m cavesson.record.read.query` is that process.
"""

import glob
import json
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from threading import Event, Timer
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
from duckdb.sqltypes import DuckDBPyType

from cavesson.errors import UserError, first_line
from cavesson.record.read.reader import Run, open
from cavesson.record.read.views import connect, files_of
from cavesson.record.segments import Kind, LiveSegments
from cavesson.text.quoting import quoted

START = 20.0
"""Seconds that starting the process may take, on a busy machine, beside those of the query."""
KINDS: tuple[Kind, ...] = ("rows", "tokens", "turns", "steps")
LARGEST = 64 << 20
"""Bytes of the largest answer."""
ROOM = 1.5
"""Address space of the process, times the memory that DuckDB may use."""
LOOK = 0.1
"""Seconds between two looks whether a query is still wanted."""

TYPES = b"types"
"""Metadata of a table that hold its columns' types."""
PLAIN = {
    "boolean", "tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger", "ubigint", "float",
    "double", "decimal", "varchar", "blob", "uuid", "enum", "null",
}  # fmt: skip
"""Types of DuckDB whose values Python has, every one."""
INTEGERS = {"hugeint", "uhugeint"}
"""Numbers that only Arrow does not have."""
PLACED = (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException)
"""Errors whose position is one in the query; that of others, which come later, is one in what DuckDB makes of it."""
NESTED = {"list", "array", "struct", "map"}
DEEPEST = 8
"""Levels of nested values; Arrow does not send more than 64."""


_running: "set[subprocess.Popen[bytes]]" = set()
"""Processes that answer queries."""


class Answer(NamedTuple):
    """The first rows of a result."""

    columns: list[str]
    types: list[str]
    """Arrow's names of the columns' types; DuckDB's where the values are DuckDB's texts, as dates and intervals are"""
    rows: list[tuple[Any, ...]]
    truncated: bool
    """whether there are more"""
    seconds: float


def query(
    run: Run,
    text: str,
    *,
    seconds: float = 10.0,
    memory: int = 1 << 30,
    limit: int = 1000,
    cancelled: Event | None = None,
) -> Answer:
    """Run one SELECT over ``rows``, ``tokens``, ``turns``, ``steps``, ``rollups``, ``vocabulary`` and ``rescored``.

    It may take ``seconds`` and ``memory`` bytes; at most ``limit`` rows are returned. It ends when ``cancelled`` is
    set.

    Raises:
        UserError: The query is invalid, is not a SELECT, reads anything but the record, exceeds a limit, or was
            cancelled. If the text is wrong, the message begins with the line and the column.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError("the query is not valid UTF-8: encode it as UTF-8") from None
    task = {"run": run.folder, "text": text, "seconds": seconds, "memory": memory, "limit": limit}
    started = time.perf_counter()
    code, out, errors = _in_a_process(task, cancelled or Event())
    if code == 2:
        # DuckDB's binding may print more lines when the process ends.
        raise UserError(errors.decode().splitlines()[0])
    if code:
        raise UserError(f"the query ended early: it may need more than {memory / 2**20:.0f} MB, which is its limit")
    table = pa.ipc.open_stream(out).read_all()
    types: list[str] = json.loads(table.schema.metadata[TYPES])
    values = [_values(column, kind) for column, kind in zip(table.columns, types, strict=True)]
    rows = list(zip(*values, strict=True))
    return Answer(table.column_names, types, rows[:limit], len(rows) > limit, time.perf_counter() - started)


def _in_a_process(task: dict[str, Any], cancelled: Event) -> tuple[int, bytes, bytes]:
    """Run the query process and return its exit code, output and error output; it has always ended on return."""
    command = [sys.executable, "-m", "cavesson.record.read.query"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        _running.add(process)
        try:
            out, errors = _outputs(process, task, cancelled)
        finally:
            process.kill()  # Ctrl-C and SIGTERM also end the wait; killing a finished process is harmless
            process.wait()
            _running.discard(process)
    return process.returncode, out, errors


def _outputs(process: "subprocess.Popen[bytes]", task: dict[str, Any], cancelled: Event) -> tuple[bytes, bytes]:
    """Wait for the output and the error output of a query process; raise UserError if it is not to go on."""
    given: bytes | None = json.dumps(task).encode()
    deadline = time.monotonic() + task["seconds"] + START
    while time.monotonic() < deadline:
        if cancelled.is_set():
            raise UserError("the query was cancelled")
        try:
            return process.communicate(given, LOOK)
        except subprocess.TimeoutExpired:
            given = None  # the first call keeps what it has not sent yet
    raise UserError(f"the query took longer than {task['seconds']:g} s, which is its limit")


def stop_queries() -> None:
    """Kill the queries of this process that are still running."""
    for process in tuple(_running):
        process.kill()


def _values(column: pa.ChunkedArray, kind: str) -> list[Any]:
    values: list[Any] = column.to_pylist()
    return [None if value is None else int(value) for value in values] if kind in INTEGERS else values


def _answer(task: dict[str, Any]) -> pa.Table:
    """Return at most one row more than the limit, running the query in the current process."""
    run = open(task["run"])
    return run.consistent(lambda live: _answered(run, live, task))


def _answered(run: Run, live: LiveSegments, task: dict[str, Any]) -> pa.Table:
    """Run the query on a snapshot; raise FileNotFoundError if a compaction has just removed some of its files."""
    memory = f"{task['memory'] // 2**20}MiB"
    connection = connect(
        run.storage,
        live,
        task["text"],
        run.computed,
        memory_limit=memory,
        temp_directory="",
        threads="2",
        errors_as_json="true",
    )
    used = [kind for kind in KINDS if kind in task["text"].lower()]
    paths = [run.storage.path(s.name(kind)) for kind in used for s in files_of(run.storage, live, kind)]
    # The views name the files as patterns, and DuckDB checks these paths too.
    connection.execute("SET allowed_paths = $1", [paths + [glob.escape(path) for path in paths]])
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    _check_is_select(connection, task["text"])
    _limit_memory(int(ROOM * task["memory"]))
    timer = Timer(task["seconds"], connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        return _readable(_bound(connection, task["text"]), task["limit"] + 1)
    except duckdb.IOException as error:
        raise FileNotFoundError(str(error)) from error
    finally:
        timer.cancel()
        timer.join()  # a thread still running at exit would crash the process


def _bound(connection: duckdb.DuckDBPyConnection, text: str) -> duckdb.DuckDBPyRelation:
    try:
        return connection.sql(text)
    except (duckdb.BinderException, duckdb.CatalogException):
        connection.execute(text)  # raises the same error, with its place
        raise


def _readable(answer: duckdb.DuckDBPyRelation, limit: int) -> pa.Table:
    """Return the first rows of an answer, as DuckDB's text where Arrow or Python cannot represent the values."""
    plain = [_is_plain(kind) for kind in answer.types]
    columns = [
        f"{f'#{i}' if as_is else f'CAST(#{i} AS VARCHAR)'} AS {quoted(name)}"
        for i, (name, as_is) in enumerate(zip(answer.columns, plain, strict=True), start=1)
    ]
    table = _small(answer.limit(limit).project(", ".join(columns)).to_arrow_reader(256))
    kinds = zip(plain, answer.types, table.schema.types, strict=True)
    types = [str(arrow) if as_is else str(duck).lower() for as_is, duck, arrow in kinds]
    return table.replace_schema_metadata({TYPES: json.dumps(types)})


def _is_plain(kind: DuckDBPyType, depth: int = 0) -> bool:
    """Whether Arrow and Python can represent every value of a type; dates after 9999, for example, they cannot."""
    if kind.id not in NESTED:
        return kind.id.strip('"') in PLAIN
    children = [child for _, child in kind.children if isinstance(child, DuckDBPyType)]
    return depth < DEEPEST and all(_is_plain(child, depth + 1) for child in children)


def _small(batches: pa.RecordBatchReader) -> pa.Table:
    """Return the whole answer; raise UserError if it is larger than ``LARGEST``."""
    found, size = [], 0
    for batch in batches:
        found.append(batch)
        size += batch.nbytes
        if size > LARGEST:
            raise UserError(f"the answer is larger than {LARGEST >> 20} MB: ask for fewer or shorter columns, or lines")
    return pa.Table.from_batches(found, batches.schema)


def _check_is_select(connection: duckdb.DuckDBPyConnection, text: str) -> None:
    statements = connection.extract_statements(text)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise UserError("the record is read-only: give one SELECT")


def _limit_memory(size: int) -> None:
    """Limit the growth of the process to ``size`` bytes; DuckDB's own limit misses some memory, such as long texts."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        import resource

        most = int(pages.read_text().split()[0]) * resource.getpagesize() + size
        # Only the soft limit is set, so that the process can raise it again if the query is restarted.
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _main() -> None:
    task = json.load(sys.stdin)
    try:
        table = _answer(task)
    except duckdb.InterruptException:
        sys.exit(_said(f"the query took longer than {task['seconds']:g} s, which is its limit"))
    except (duckdb.OutOfMemoryException, MemoryError, pa.ArrowMemoryError):
        sys.exit(_said(f"the query needs more than {task['memory'] / 2**20:.0f} MB of memory, which is its limit"))
    except duckdb.Error as error:
        sys.exit(_said(_placed(error, task["text"])))
    except (UserError, UnicodeError) as error:
        sys.exit(_said(first_line(error)))
    with pa.ipc.new_stream(sys.stdout.buffer, table.schema) as out:
        out.write_table(table)


def _placed(error: duckdb.Error, text: str) -> str:
    """Return what DuckDB says is wrong in one line, after the line and the column of the query if it names a place."""
    try:
        details = json.loads(str(error).partition(": ")[2])
    except ValueError:
        return first_line(error)
    lines = details["exception_message"].strip().splitlines()
    said = " ".join(lines) if len(lines) == 2 else lines[0]  # the second of two is a hint; more are a long list of them
    if "position" not in details or not isinstance(error, PLACED):
        return f"{details['exception_type']} Error: {said}"
    before = text.encode()[: int(details["position"])].decode(errors="ignore").split("\n")
    return f"line {len(before)}, column {len(before[-1]) + 1}: {said}"


def _said(line: str) -> int:
    sys.stderr.buffer.write(f"{line}\n".encode(errors="backslashreplace"))
    return 2


if __name__ == "__main__":
    _main()
