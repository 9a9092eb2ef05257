"""A real HTTP proxy before a server that fails: it answers 503, or drops the connection before or after a request."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import urlsplit

WAYS = ("503", "dropped before", "dropped after")
"""How requests fail, in turn; in the last way, the server has done what it was asked."""


class Unreliable:
    """Passes requests on to a server.

    Attributes:
        every: every request with a number that this divides fails; 0 = none.
        down: whether all requests fail.
        lasts: number of requests after which all fail; None = for ever.
        failed: how requests have failed so far.
    """

    def __init__(self, server: str) -> None:
        self.server = urlsplit(server)
        self.every, self.down, self.url = 0, False, ""
        self.lasts: int | None = None
        self.requests, self.failed = 0, list[str]()
        self._numbers, self._lock = count(1), threading.Lock()

    def fate(self) -> str | None:
        """How the next request fails, or None if it does not."""
        with self._lock:
            self.requests = next(self._numbers)
            self.down = self.down or (self.lasts is not None and self.requests > self.lasts)
            if self.down or (self.every and self.requests % self.every == 0):
                self.failed.append("dropped before" if self.down else WAYS[len(self.failed) % len(WAYS)])
                return self.failed[-1]
        return None


class Handler(BaseHTTPRequestHandler):
    """Passes one connection's requests on."""

    protocol_version = "HTTP/1.1"
    proxy: Unreliable

    def do_GET(self) -> None:
        body, way = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.proxy.fate()
        if way is None or way == "dropped after":
            link = http.client.HTTPConnection(self.proxy.server.netloc, timeout=60)
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            content = answer.read()
            link.close()
        if way is None:
            self.answer(answer.status, answer.getheaders(), content)
        elif way == "503":
            self.answer(503, [], b"")
        else:
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        own = ("transfer-encoding", "connection") + ("content-length",) * (self.command != "HEAD")
        for name, value in headers:
            if name.lower() not in own:
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        with suppress(ConnectionError):  # the client may have ended meanwhile
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def unreliable(server: str) -> Iterator[Unreliable]:
    """A proxy on a free port before the server with this URL."""
    proxy = Unreliable(server)
    listening = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"proxy": proxy}))
    listening.daemon_threads = True
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    proxy.url = f"http://127.0.0.1:{listening.server_address[1]}"
    try:
        yield proxy
    finally:
        listening.shutdown()
        listening.server_close()
