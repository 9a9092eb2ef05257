"""The page, which is answered at once, and the data, for which the runs must be open."""

import asyncio
from concurrent.futures import Future
from threading import Event

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cavesson.board.opening import Opening
from cavesson.board.page import NO_PAGE, STATIC
from cavesson.board.security import refuse

FIRST = "/api/answers"
"""What the page asks for first: the runs and their curves."""
MEDIA = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Site:
    """Answers requests for the page, while what answers the others may still be on its way.

    Args:
        api: What answers requests for data, once it is there.
        opening: What was answered first the last time, if it is kept.
        asked: Is set once something is asked for that only the open runs can answer.
    """

    def __init__(self, api: "Future[ASGIApp]", opening: Opening | None = None, asked: Event | None = None) -> None:
        self.api = api
        self.opening = opening
        self.asked = asked or Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/api/"):
            await _page(scope["path"], scope["method"])(scope, receive, send)
            return
        if self.opening is not None and scope["path"] == FIRST:
            opening, self.opening = self.opening, None
            kept = opening.answer(scope["query_string"])
            if kept is not None:
                await Response(kept, media_type="application/json")(scope, receive, send)
                return
            send = _keeping(opening, scope["query_string"], send)
        self.asked.set()
        # A request that is given up must not take the others' answer with it.
        api = self.api.result() if self.api.done() else await asyncio.shield(asyncio.wrap_future(self.api))
        await api(scope, receive, send)


def _keeping(opening: Opening, query: bytes, send: Send) -> Send:
    """Returns what sends an answer and keeps it for the next start."""
    status, body = 0, b""

    async def send_and_keep(message: Message) -> None:
        nonlocal status, body
        await send(message)
        status = message.get("status", status)
        body += message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body") and status == 200:
            opening.keep(query, body)

    return send_and_keep


def _page(path: str, method: str) -> Response:
    """Returns a file of the page, or for any other address, each being a view of it, the page itself."""
    if method not in ("GET", "HEAD"):
        return refuse("the page can only be read", 405)
    files = {f"/{file.name}": file for file in STATIC.iterdir()} if STATIC.is_dir() else {}
    if "/index.html" not in files:
        return refuse(NO_PAGE, 404)
    file = files.get(path, files["/index.html"])
    return Response(file.read_bytes(), media_type=MEDIA.get(file.suffix, "application/octet-stream"))
