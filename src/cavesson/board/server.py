"""The application that handles requests for data."""

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cavesson.board.api import ENDPOINTS, Endpoint
from cavesson.board.openapi import describe
from cavesson.board.partial import answered
from cavesson.board.runs import Board, NotFoundError, UnreadableError
from cavesson.board.security import MAX_BODY, TOO_LONG, refuse
from cavesson.board.turns import BusyError, Turns
from cavesson.errors import UserError, first_line, print_exception
from cavesson.index.maps import release_memory

THREADS = ThreadPoolExecutor(32, "answers")
RUNNING = 2
"""Maximum number of concurrent SQL queries; together they use at most this multiple of the memory and cores of one."""
WAITING, WAIT = 4, 3.0
"""Queries that wait for their turn, and for how many seconds; more are refused, and can be sent again."""
BODY_SECONDS = 10
"""How long the body of a request may take to come."""
STATUS: dict[type[UserError], int] = {NotFoundError: 404, UnreadableError: 409, BusyError: 503}
"""Status of errors that are not a mistake in the request itself, which is 400."""


def create_api(board: Board) -> ASGIApp:
    """Return the application that handles requests for data."""
    queries = Turns(RUNNING, WAITING, WAIT)
    # A name may have the parent's name in front of it, as in first/run.
    routes = [
        Route(e.path.replace("{run}", "{run:path}"), _handler(board, e, queries), methods=[e.method]) for e in ENDPOINTS
    ]
    routes += [Route("/api/openapi.json", _openapi), Route("/{path:path}", _unknown)]
    known = (UserError, ValidationError, pa.ArrowException, OSError, UnicodeDecodeError)
    handlers = dict.fromkeys(known, _failed) | {HTTPException: _http_error, Exception: _bug}
    return Starlette(routes=routes, exception_handlers=handlers)


def json_response(content: Any, status: int = 200) -> Response:
    """Return a JSON response in which numbers that are not finite are null."""
    try:
        body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # A lone surrogate in a name or in run.json, or an integer of more than 64 bits.
        body = json.dumps(_plain(content)).encode()
    return Response(body, status, media_type="application/json")


def _plain(content: Any) -> Any:
    """Return the content with lists instead of arrays, and null for numbers that are not finite."""
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, np.ndarray):
        return _plain(content.tolist())
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _handler(board: Board, endpoint: Endpoint, queries: Turns) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        given = dict(request.query_params) | request.path_params
        if "after" in endpoint.query.model_fields and "last-event-id" in request.headers:
            given["after"] = request.headers["last-event-id"]
        if endpoint.method in ("PUT", "POST"):
            given = _together(given, await _body(request))
        query = endpoint.query.model_validate(given)
        if endpoint.heavy:
            async with queries.turn():
                answer = await _wanted(request, partial(endpoint.answer, board, query))
        else:
            answer = await asyncio.get_running_loop().run_in_executor(THREADS, answered, board, endpoint, query)
        release_memory()
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, bytes):
            return Response(answer, media_type=endpoint.media)
        return json_response(answer)

    return handle


async def _wanted(request: Request, answer: Callable[[Event], Any]) -> Any:
    """Return an answer that a thread makes, and tell it if the client has closed the connection meanwhile."""
    cancelled = Event()
    watch = asyncio.create_task(_watch(request, cancelled))
    try:
        return await asyncio.get_running_loop().run_in_executor(THREADS, answer, cancelled)
    finally:
        watch.cancel()


async def _watch(request: Request, cancelled: Event) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    cancelled.set()


async def _body(request: Request) -> dict[str, Any]:
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY:
                    raise HTTPException(413, TOO_LONG)
    except TimeoutError:
        raise HTTPException(408, f"the body took longer than {BODY_SECONDS} s", {"connection": "close"}) from None
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return content


def _together(address: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    twice = sorted(address.keys() & body.keys())
    if twice:
        raise HTTPException(400, f"{twice[0]} is given twice: in the address and in the body")
    return address | body


async def _failed(request: Request, error: Exception) -> Response:
    """Return the response to an error; errors not caused by the user are also printed in the terminal."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        field, reason = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        return refuse(f"{field}: {reason}", 422)
    if isinstance(error, UserError):
        status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 400)
        return refuse(" ".join(str(error).split("\n")), status)
    print_exception(error)
    # Most likely a file of the index that has just been rebuilt.
    return refuse(f"the record or its index cannot be read: {first_line(error)}", 409)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = refuse(error.detail, error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _bug(request: Request, error: Exception) -> Response:
    """Return a plain error response; Starlette raises the error again, so the terminal already has the traceback."""
    return refuse("the board made a mistake; what happened is in its terminal", 500)


async def _openapi(request: Request) -> Response:
    return json_response(describe())


async def _unknown(request: Request) -> Response:
    return refuse("there is no such request; see /api/openapi.json", 404)
