"""The HTTP server of the board."""

import json
import math
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dressage.board.api import ENDPOINTS, Endpoint
from dressage.board.openapi import describe
from dressage.board.page import NO_PAGE, STATIC
from dressage.board.runs import Board, NotFoundError, UnreadableError
from dressage.board.security import MOST_BODY, TOO_LONG, Guard, refuse
from dressage.errors import UserError
from dressage.index.maps import relieve


def create_app(board: Board, token: str | None = None) -> ASGIApp:
    """Returns the application; everything it answers, it answers through the guard."""
    routes = [Route(e.path, _handler(board, e), methods=[e.method]) for e in ENDPOINTS]
    routes.append(Route("/api/openapi.json", _openapi))
    # Every view of the page has an address of its own.
    routes += [Route("/{path:path}", _page)]
    handlers = {UserError: _user_error, HTTPException: _http_error, Exception: _bug}
    handlers |= dict.fromkeys((pa.ArrowException, OSError, UnicodeDecodeError), _broken_file)
    return Guard(Starlette(routes=routes, exception_handlers=handlers), token)


def json_response(content: Any, status: int = 200) -> Response:
    """Returns JSON in which numbers that are not finite are null."""
    try:
        body = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        # Half a surrogate pair in a name or in run.json, or a number of more than 64 bits.
        body = json.dumps(_plain(content)).encode()
    return Response(body, status, media_type="application/json")


def _plain(content: Any) -> Any:
    """Returns the same with lists for arrays, and null for numbers that are not finite."""
    if isinstance(content, dict):
        return {str(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, np.ndarray):
        return _plain(content.tolist())
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _handler(board: Board, endpoint: Endpoint) -> Callable[[Request], Any]:
    async def handle(request: Request) -> Response:
        given = dict(request.query_params) | request.path_params
        if "after" in endpoint.query.model_fields and "last-event-id" in request.headers:
            given["after"] = request.headers["last-event-id"]
        if endpoint.method in ("PUT", "POST"):
            given |= await _body(request)
        try:
            query = endpoint.query.model_validate(given)
        except ValidationError as error:
            return refuse(_explain(error), 422)
        answer = await run_in_threadpool(endpoint.answer, board, query)
        relieve()
        if isinstance(answer, Response):
            return answer
        if isinstance(answer, bytes):
            return Response(answer, media_type=endpoint.media)
        return json_response(answer)

    return handle


async def _body(request: Request) -> dict[str, Any]:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MOST_BODY:
            raise HTTPException(413, TOO_LONG)
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return content


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return f"{place}: {first['msg']}"


async def _user_error(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, NotFoundError) else 409 if isinstance(error, UnreadableError) else 400
    return refuse(" ".join(str(error).split("\n")), status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refuse(error.detail, error.status_code)


async def _broken_file(request: Request, error: Exception) -> Response:
    """Most likely one of the index, which has just been built anew."""
    traceback.print_exception(error)
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return refuse(f"the record or its index cannot be read: {reason}", 409)


async def _bug(request: Request, error: Exception) -> Response:
    """The traceback is in the terminal of the server."""
    return refuse("the board made a mistake; what happened is in its terminal", 500)


async def _openapi(request: Request) -> Response:
    return json_response(describe())


async def _page(request: Request) -> Response:
    """Returns a file of the page, or for any other address, each being a view of it, the page itself."""
    path = request.path_params["path"]
    if path.startswith("api/"):
        return refuse("there is no such request; see /api/openapi.json", 404)
    files = {file.name: file for file in STATIC.iterdir()} if STATIC.is_dir() else {}
    if "index.html" not in files:
        return refuse(NO_PAGE, 404)
    return FileResponse(files.get(path, files["index.html"]))
