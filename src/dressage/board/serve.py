"""Starts the board: opens the runs, starts what indexes them, and serves until it is interrupted."""

import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Timer
from types import FrameType

import uvicorn

from dressage.board.page import NO_PAGE, STATIC
from dressage.board.runs import Board, open_run
from dressage.board.security import is_loopback
from dressage.board.server import create_app
from dressage.errors import UserError
from dressage.index.process import small_process
from dressage.index.watch import start

GRACE = 1
"""Seconds that answers which are being made get when the board is told to stop."""
WARM_AFTER = 1.0
"""Seconds from the start after which the board reads what will be needed: not while the page is opening."""


def serve(paths: Sequence[str], *, host: str, port: int, token: str | None, browser: bool) -> None:
    """Serves the board of some runs until it is interrupted.

    Args:
        paths: Run folders.
        host: Address to listen on. Any but those of this machine needs a token, which is made if none is given.
        port: Port to listen on; 0 takes a free one.
        token: What every request must bring.
        browser: Whether to open the page.

    Raises:
        UserError: A path is no run, or the port is taken.
    """
    board = Board([open_run(path) for path in paths])
    listener = _listen(host, port)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    for run in board.runs:
        # What has an index can be shown at once: then the page comes first.
        indexing = partial(start, run.record.folder, run.folder)
        _later(WARM_AFTER, indexing) if run.snapshot().rows else indexing()
    _later(WARM_AFTER, board.warm)
    address = _address(host, listener.getsockname()[1], token)
    print(f"board    {address}")
    if token is not None and not is_loopback(host):
        print(f"open     to everybody who reaches {host}: each request needs the token in that address")
    for run in board.runs:
        if not run.record.info:
            print(f"note     {run.record.folder} is no run yet; it appears once it begins")
    if not (STATIC / "index.html").is_file():
        print(f"note     {NO_PAGE}")
    if browser:
        _later(0.3, partial(webbrowser.open, address))
    config = uvicorn.Config(
        create_app(board, token),
        log_level="warning",
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE,
    )
    with suppress(KeyboardInterrupt), small_process():
        _Server(config, board).run(sockets=[listener])


def _later(seconds: float, act: Callable[[], object]) -> None:
    timer = Timer(seconds, act)
    timer.daemon = True
    timer.start()


class _Server(uvicorn.Server):
    """Ends the open streams of events when it is told to stop, since they would never end."""

    def __init__(self, config: uvicorn.Config, board: Board) -> None:
        super().__init__(config)
        self.board = board

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.board.closing = True
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
        # Inherited by every connection: otherwise the end of a short answer waits 40 ms for its beginning's receipt.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --port") from None


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
