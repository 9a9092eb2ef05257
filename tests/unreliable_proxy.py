"""A real HTTP proxy before a server that fails: it answers 503, or drops the connection before or after a request."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
        failed: how requests have failed so far.
    """

    def __init__(self, server: str) -> None:
        self.server = urlsplit(server)
        self.every, self.down, self.url = 0, False, ""
        self.requests, self.failed = 0, list[str]()
        self._numbers, self._lock = count(1), threading.Lock()

    def fate(self) -> str | None:
        """How the next request fails, or None if it does not."""
        with self._lock:
            self.requests = next(self._numbers)
            if self.down or (self.every and self.requests % self.every == 0):
                self.failed.append("dropped before" if self.down else WAYS[len(self.failed) % len(WAYS)])
                return self.failed[-1]
        return None


@contextmanager
def unreliable(server: str) -> Iterator[Unreliable]:
    """A proxy on a free port before the server with this URL."""
    proxy = Unreliable(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            way = proxy.fate()
            if way == "dropped before":
                self.close_connection = True
                return
            if way == "503":
                self.answer(503, [], b"")
                return
            assert proxy.server.hostname is not None
            link = http.client.HTTPConnection(proxy.server.hostname, proxy.server.port, timeout=60)
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            content = answer.read()
            link.close()
            if way == "dropped after":
                self.close_connection = True
                return
            self.answer(answer.status, answer.getheaders(), content)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response_only(status)
            own = ("transfer-encoding", "connection", "content-length")
            for name, value in headers:
                if name.lower() not in own or (name.lower() == "content-length" and self.command == "HEAD"):
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    proxy.url = f"http://127.0.0.1:{listening.server_address[1]}"
    try:
        yield proxy
    finally:
        listening.shutdown()
        listening.server_close()
