"""Several responses in one, because a request costs the browser more than most responses cost the server."""

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

import pyarrow as pa
from pydantic import Field, Json, ValidationError
from starlette.routing import compile_path

from cavesson.board.runs import Board, NotFoundError, UnreadableError
from cavesson.board.selection import Query
from cavesson.board.turns import BusyError
from cavesson.errors import UserError, first_line, print_exception

if TYPE_CHECKING:
    from cavesson.board.api import Endpoint

MOST = 32
"""Requests in one."""


STATUS: dict[type[UserError], int] = {NotFoundError: 404, UnreadableError: 409, BusyError: 503}
"""Of errors that are no mistake in the request itself, which are 400."""
UNKNOWN = "there is no such request; see /api/openapi.json"
BUG = "the board made a mistake; what happened is in its terminal"


class SeveralQuery(Query):
    of: Json[list[str]] = Field(max_length=100_000)
    """Addresses behind /api/ of requests that are answered with JSON, as a JSON list."""


class Failure(NamedTuple):
    """Why a request failed."""

    status: int
    reason: str


def answer_all(endpoints: Sequence["Endpoint"], board: Board, asked: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each of several requests its ``status`` and either its ``answer`` or its ``error``.

    Raises:
        UserError: There are too many requests.
    """
    if len(asked) > MOST:
        raise UserError(f"{len(asked)} requests in one; the board answers {MOST} at once at most")
    return [_answer(endpoints, board, one) for one in asked]


def _answer(endpoints: Sequence["Endpoint"], board: Board, asked: str) -> dict[str, Any]:
    path, _, query = asked.partition("?")
    for endpoint in endpoints:
        if found := _pattern(endpoint.path).match(f"/api/{path}"):
            try:
                if board.closing.is_set():  # the process would wait for all remaining responses before it stops
                    raise BusyError("the board is stopping")
                given = dict(parse_qsl(query, keep_blank_values=True)) | found.groupdict()
                return {"status": 200, "answer": endpoint.answer(board, endpoint.query.model_validate(given))}
            except Exception as error:
                status, reason = explain(error)
                return {"status": status, "error": reason}
    return {"status": 404, "error": UNKNOWN}


@cache
def _pattern(path: str) -> re.Pattern[str]:
    return compile_path(path)[0]


def explain(error: Exception) -> Failure:
    """Return what the page is told about an error; errors not caused by the user are also printed in the terminal."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place, reason = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        return Failure(422, f"{place}: {reason}")
    if isinstance(error, UserError):
        return Failure(
            next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400),
            " ".join(str(error).split("\n")),
        )
    print_exception(error)
    if isinstance(error, pa.ArrowException | OSError | UnicodeDecodeError):
        # Most likely a file of the index that has just been rebuilt.
        return Failure(409, f"the record or its index cannot be read: {first_line(error)}")
    return Failure(500, BUG)
