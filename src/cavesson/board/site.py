"""The page, which is served at once, and the data, which needs the open runs."""

import asyncio
import re
from concurrent.futures import Future
from pathlib import Path
from threading import Event

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavesson.board.opening import Opening
from cavesson.board.page import NO_PAGE, STATIC, VIEWS
from cavesson.board.security import refuse
from cavesson.text.visible import visible

FIRST = re.compile(r"/api/runs(/.+/series)?")
"""What the page asks for first: the runs and their curves."""
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Site:
    """Serves the page while the application that handles the other requests may still be starting."""

    def __init__(self, api: "Future[ASGIApp]", opening: Opening | None = None, asked: Event | None = None) -> None:
        self.api, self.opening = api, opening
        self.asked = asked or Event()
        """Set at the first request that only the open runs can answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/api/"):
            await _page(scope["path"], scope["method"], Headers(scope=scope))(scope, receive, send)
            return
        if self.opening is not None and FIRST.fullmatch(scope["path"]):
            query = scope["query_string"].decode("latin-1")
            kept = self.opening.answer(scope["path"], query)
            if kept is not None:
                await Response(kept, media_type="application/json")(scope, receive, send)
                return
            send = _keeping(self.opening, scope["path"], query, send)
        self.asked.set()
        # Without the shield, one cancelled request would cancel the start for all others.
        api = self.api.result() if self.api.done() else await asyncio.shield(asyncio.wrap_future(self.api))
        await api(scope, receive, send)


def _keeping(opening: Opening, path: str, query: str, send: Send) -> Send:
    """Return a function that sends a response and caches it for the next start."""
    status, body = 0, b""

    async def send_and_keep(message: Message) -> None:
        nonlocal status, body
        await send(message)
        status = message.get("status", status)
        body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body") and status == 200:
            opening.keep(path, query, body)

    return send_and_keep


def _page(path: str, method: str, asked: Headers) -> Response:
    """Return a file of the page, or the page itself for its views and, with status 404, for a view that it lacks."""
    if method not in ("GET", "HEAD"):
        return refuse("the page is read-only", 405)
    files = {f"/{file.name}": file for file in STATIC.iterdir() if file.suffix in MEDIA} if STATIC.is_dir() else {}
    if "/index.html" not in files:
        return refuse(NO_PAGE, 404)
    name = path.removeprefix("/")
    if "/" in name or name == "api":  # from where the page would not find its own files
        return refuse(f"there is no page {visible(path)}", 404)
    file = files.get(path, files["/index.html"])
    status = 200 if path in files or name in ("", *VIEWS) else 404
    return _file(file, status, asked)


def _file(file: Path, status: int, asked: Headers) -> Response:
    """Return a file of the page, compressed if the build did so, or only that the browser has it already."""
    packed = file.with_name(file.name + ".gz")
    sent = packed if "gzip" in asked.get("accept-encoding", "") and packed.is_file() else file
    kept = sent.stat()
    tag = f'"{kept.st_mtime_ns:x}-{kept.st_size:x}"'
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if status == 200 and tag in asked.get("if-none-match", ""):
        return Response(None, 304, headers)
    if sent is packed:
        headers["content-encoding"] = "gzip"
    return Response(sent.read_bytes(), status, headers, MEDIA[file.suffix])
