"""Timeouts for idle connections and a limit to their number."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_CONNECTIONS = 128
"""Connections at once: with the files of the runs fewer than 256, which is how many a process may open on macOS."""
BACKLOG = 64
"""Connections that the system accepts while the board is busy."""
REQUEST_SECONDS = 10.0
"""Maximum seconds from the opening of a connection, or from the last response, to the head of a request."""
READING_SECONDS = 60.0
"""Maximum seconds in which a client reads nothing of its response."""
MAX_HEAD = 256 << 10
"""Bytes of the head of a request: the address of a page can hold a long query in SQL, in escapes."""
SELDOM, LINE = 60.0, 60
"""Seconds before the same line is logged again, and how many of its characters tell it from others."""


class Connection(H11Protocol):
    """A connection that is closed if it does not send a request in time or does not read its response.

    If there are too many connections, the one that has waited longest for a request is closed, so that active clients
    are served even if others hold hundreds of connections open.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._deadline: asyncio.TimerHandle | None = None
        self.waiting_since: float | None = None
        """When it began to wait for a request; None while one is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        held = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(held) > MAX_CONNECTIONS:
            # Connections that are being served have no waiting time; the new one always has one.
            min(held, key=lambda one: one.waiting_since or math.inf).transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_request()

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()  # starts a request that arrived in the meantime
        self._note_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_clock()
        if self.waiting_since is not None:
            self._wait()

    def _note_request(self) -> None:
        """Stop waiting if a request has arrived."""
        if self.waiting_since is not None and self.cycle is not None and not self.cycle.response_complete:
            self.waiting_since = None
            self._stop_clock()

    def _wait(self) -> None:
        self.waiting_since = time.monotonic()
        if not self.flow.write_paused:  # otherwise the previous response has not been read yet
            self._end_after(REQUEST_SECONDS, self.transport.abort)

    def _await_reading(self, last: float = math.inf) -> None:
        """Close the connection if the client has read nothing since the last check."""
        left = self.transport.get_write_buffer_size()
        if left < last:
            self._end_after(READING_SECONDS, self._await_reading, left)
        else:
            self.transport.abort()

    def _end_after(self, seconds: float, act: Callable[..., None], *arguments: float) -> None:
        self._stop_clock()
        self._deadline = self.loop.call_later(seconds, act, *arguments)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Seldom(logging.Filter):
    """Passes the same line once a minute, because a problem of one connection can affect thousands."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = record.getMessage()[:LINE], time.monotonic()
        known = now - self._last.get(line, -SELDOM) < SELDOM
        if not known:
            self._last = {text: then for text, then in self._last.items() if now - then < SELDOM} | {line: now}
        return not known
