"""SQL on one run, read-only and within limits."""

import json
from decimal import Decimal
from threading import Event
from typing import Any

from pydantic import Field

from cavesson.board.runs import Board
from cavesson.board.selection import RunQuery

MEMORY = 512 << 20
"""Bytes."""
SECONDS = 10.0
MAX_LINES = 10_000
EXACT = 2**53
"""Integers beyond it are not exact in JavaScript, which reads the answer."""
DIGITS = 15
"""Of a decimal number that a float64 keeps."""


class SqlQuery(RunQuery):
    query: str = Field(min_length=1, max_length=20_000)
    """One SELECT over rows, tokens, turns, steps, rollups, vocabulary and rescored."""
    limit: int = Field(1000, ge=1, le=MAX_LINES)
    """Maximum number of rows of the answer."""


def sql(board: Board, query: SqlQuery, cancelled: Event) -> dict[str, Any]:
    """Run one query under the limits of ``cavesson sql``.

    ``truncated`` says that there are more rows than ``limit``. Lists and maps are JSON texts; so are, as texts,
    integers beyond 2^53 and whatever JSON lacks. The query ends when the client closes the connection.
    """
    from cavesson.record.read.query import query as run_query  # imports DuckDB, which would slow down the start
    from cavesson.record.read.query_output import lines_of

    record = board.run(query.run).record
    answer = run_query(record, query.query, seconds=SECONDS, memory=MEMORY, limit=query.limit, cancelled=cancelled)
    return {
        "columns": answer.columns,
        "types": answer.types,
        "rows": [[_plain(value) for value in line] for line in lines_of(answer)],
        "truncated": answer.truncated,
        "seconds": answer.seconds,
    }


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    if isinstance(value, list | dict):
        return json.dumps(value, default=str, ensure_ascii=False)
    if isinstance(value, Decimal) and len(value.as_tuple().digits) <= DIGITS:
        return float(value)
    if isinstance(value, int) and abs(value) > EXACT:
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)
