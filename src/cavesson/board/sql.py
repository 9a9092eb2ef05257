"""SQL on one run, read-only and within limits."""

from typing import Any

from pydantic import Field

from cavesson.board.runs import Board
from cavesson.board.selection import RunQuery

MEMORY = 512 << 20
"""Bytes."""
SECONDS = 10.0


class SqlQuery(RunQuery):
    query: str = Field(min_length=1, max_length=20_000)
    """One SELECT over rows, tokens, turns, steps, rollups, vocabulary and rescored."""


def sql(board: Board, query: SqlQuery) -> dict[str, Any]:
    """Run one query under the limits of ``cavesson sql``."""
    from cavesson.record.read.query import query as run_query  # imports DuckDB, which would slow down the start

    answer = run_query(board.run(query.run).record, query.query, seconds=SECONDS, memory=MEMORY)
    return {
        "columns": answer.columns,
        "types": answer.types,
        "rows": [[_plain(value) for value in row] for row in answer.rows],
        "truncated": answer.truncated,
        "seconds": answer.seconds,
    }


def _plain(value: Any) -> Any:
    """Return a value that JSON can represent."""
    return value if isinstance(value, bool | int | float | str | None) else str(value)
