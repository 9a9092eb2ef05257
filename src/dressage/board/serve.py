"""Starts the board: opens the runs, starts what indexes them, and serves until it is interrupted."""

import secrets
import socket
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from threading import Timer
from types import FrameType

import uvicorn

import dressage.record
from dressage.board.page import NO_PAGE, STATIC
from dressage.board.runs import Board
from dressage.board.security import is_loopback
from dressage.board.server import create_app
from dressage.errors import UserError
from dressage.index.watch import start

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
    board = Board([dressage.record.open(path) for path in paths])
    listener = _listen(host, port)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    for run in board.runs:
        start(run.record.folder, run.folder)
    warming = Timer(WARM_AFTER, board.warm)
    warming.daemon = True
    warming.start()
    address = _address(host, listener.getsockname()[1], token)
    print(f"board    {address}")
    if token is not None and not is_loopback(host):
        print(f"open     to everybody who reaches {host}: each request needs the token in that address")
    if not (STATIC / "index.html").is_file():
        print(f"note     {NO_PAGE}")
    if browser:
        opening = Timer(0.3, webbrowser.open, (address,))
        opening.daemon = True
        opening.start()
    config = uvicorn.Config(create_app(board, token), log_level="warning", server_header=False, lifespan="off")
    with suppress(KeyboardInterrupt):
        _Server(config, board).run(sockets=[listener])


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
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --port") from None


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")
