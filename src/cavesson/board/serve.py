"""Starts the board: serves the page, opens the runs, starts what indexes them, until it is interrupted.

What the runs need is imported while the browser already loads the page: it takes longer than all else at the start.
"""

import gc
import logging
import secrets
import socket
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Timer
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn

from cavesson.board.connections import BACKLOG, Connection, Seldom
from cavesson.board.opening import Opening
from cavesson.board.page import NO_PAGE, STATIC
from cavesson.board.security import Guard, checked_token, is_loopback
from cavesson.board.site import Site
from cavesson.errors import UserError
from cavesson.text.visible import visible

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from cavesson.board.runs import Board

GRACE = 1
"""Seconds that answers which are being made get when the board is told to stop."""
UNASKED = 1.0
"""Seconds that the runs wait to be opened where the page has its first answer: drawing it needs the cores."""
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
        UserError: A path is no run, the token or the host is empty, or the port is taken.
    """
    if token is not None:
        checked_token(token)
    listener = _listen(host, port)
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    address = _address(host, listener.getsockname()[1], token)
    closing, asked = Event(), Event()
    kept = Opening(paths)
    show = partial(_show, address, host if token and not is_loopback(host) else None, browser)
    with ThreadPoolExecutor(1, "opening") as pool:
        opening = pool.submit(_open_runs, paths, closing, show, asked if kept.is_kept() else None)
        server = _Server(Guard(Site(opening, kept, asked), token), closing)
        opening.add_done_callback(server.stop_without)
        try:
            with suppress(KeyboardInterrupt):
                server.run(sockets=[listener])
        finally:
            _stop_queries()
        opening.result()


def _stop_queries() -> None:
    """Ends queries whose answers nobody waits for any more, for which this process would wait."""
    from cavesson.record.query import stop_queries

    stop_queries()


def _show(address: str, open_to: str | None, browser: bool) -> None:
    print(f"board    {address}", flush=True)
    if open_to:
        print(f"open     to everybody who reaches {open_to}: each request needs the token in that address")
    if browser:
        _later(0, partial(webbrowser.open, address))


def _open_runs(paths: Sequence[str], closing: Event, show: Callable[[], None], asked: Event | None) -> "ASGIApp":
    """Opens the runs; ``asked``, where the page can be shown before, tells when it needs them."""
    if asked:
        show()
        asked.wait(UNASKED)
    board = _opened(paths, closing)
    if not asked:
        show()
    _note(board)
    return _made_ready(board)


def _opened(paths: Sequence[str], closing: Event) -> "Board":
    from cavesson.record.background import REUSED, small_process

    small_process(REUSED)
    from cavesson.board.runs import Board, open_run

    return Board([open_run(path) for path in paths], closing)


def _note(board: "Board") -> None:
    for run in board.runs:
        if not run.record.info:
            print(f"note     {visible(str(run.record.folder))} is no run yet; it appears once it begins")
    if not (STATIC / "index.html").is_file():
        print(f"note     {NO_PAGE}")


def _made_ready(board: "Board") -> "ASGIApp":
    """Returns what answers the requests, and starts what may come after the first answers."""
    from cavesson.board.server import create_api

    for run in board.runs:
        # What has an index can be shown at once: then the page comes first.
        _later(WARM_AFTER if run.snapshot().rows else 0, partial(_index, run.record.folder, run.folder))
    _later(WARM_AFTER, board.warm)
    gc.freeze()  # what was imported stays: otherwise answers wait now and then until all of it was looked through
    return create_api(board)


def _index(run: str, folder: Path) -> None:
    from cavesson.board.indexing import start

    start(run, folder)


def _later(seconds: float, act: Callable[[], object]) -> None:
    timer = Timer(seconds, act)
    timer.daemon = True
    timer.start()


class _Server(uvicorn.Server):
    """Ends the open streams of events when it is told to stop, since they would never end."""

    def __init__(self, app: "ASGIApp", closing: Event) -> None:
        config = uvicorn.Config(
            app,
            log_level="error",  # a client's mistakes are its own: it is told, and the terminal is not filled
            server_header=False,
            lifespan="off",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE,
        )
        logging.getLogger("asyncio").addFilter(Seldom())
        super().__init__(config)
        self.closing = closing

    def stop_without(self, runs: "Future[ASGIApp]") -> None:
        """Stops if the runs could not be opened."""
        if runs.exception():
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.closing.set()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    if not host:
        raise UserError("--host is empty: give an address, such as 127.0.0.1; 0.0.0.0 listens on all")
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
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
