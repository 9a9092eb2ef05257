"""Starts the board: serves the page, opens the runs and starts the processes that index them, until interrupted.

The imports that the runs need take longer than the rest of the start, so they run while the browser loads the page.
"""

import atexit
import gc
import logging
import secrets
import shutil
import socket
import tempfile
import webbrowser
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from threading import Event, Timer
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote

import uvicorn

from cavesson.board.connections import BACKLOG, MAX_HEAD, Connection, Seldom
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
"""Grace period for in-flight responses at shutdown, in seconds."""
UNASKED = 1.0
"""Seconds that the runs wait to be opened where the page has its first answer: drawing it needs the cores."""
WARM_AFTER = 1.0
"""Seconds from the start after which the board reads what will be needed: not while the page is opening."""


def serve(
    paths: Sequence[str],
    *,
    host: str,
    port: int,
    token: str | None,
    browser: bool,
    wait: bool = False,
    allow_remote: bool = False,
) -> None:
    """Serve the board of some run folders until interrupted.

    The token must come with every request; "" = one is generated; None = requests need none, which only an address of
    this machine allows. Port 0 selects a free one. With ``wait``, runs that have not begun are shown once they begin;
    with ``allow_remote``, records may be at other places that their folders name.

    Raises:
        UserError: A path is not a run, the token cannot be sent, the host is empty or needs a token, or the port is in
            use.
    """
    if token is None and host and not is_loopback(host):
        raise UserError(f"--no-token is not allowed on {host}, which other machines can reach: remove it")
    if token == "":
        token = secrets.token_urlsafe(24)
    if token is not None:
        checked_token(token)
    listener = _listen(host, port)
    address = _address(host, listener.getsockname()[1], token)
    closing, asked = Event(), Event()
    kept = Opening(paths)
    show = partial(_show, address, host if token and not is_loopback(host) else None, browser)
    with ThreadPoolExecutor(1, "opening") as pool:
        opened = partial(_opened, paths, wait, allow_remote, closing)
        opening = pool.submit(_open_runs, opened, show, asked if kept.is_kept() else None)
        server = _Server(Guard(Site(opening, kept, asked), token), closing)
        opening.add_done_callback(server.stop_without)
        try:
            with suppress(KeyboardInterrupt):
                server.run(sockets=[listener])
        finally:
            from cavesson.record.read.query import stop_queries

            stop_queries()  # whose results are no longer needed, and for which this process would otherwise wait
        opening.result()


def _show(address: str, open_to: str | None, browser: bool) -> None:
    print(f"board    {address}", flush=True)
    if open_to:
        print(f"open     to everyone who can reach {open_to}: each request needs the token in that address")
    if browser:
        _later(0, partial(webbrowser.open, _page_that_leads_to(address)))


def _page_that_leads_to(address: str) -> str:
    """Return the URL of a local page that leads to the board, as other users see the arguments of a browser's process.

    The page is private to the user, and removed when the board ends.
    """
    folder = tempfile.mkdtemp(prefix="cavesson-board-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    page = Path(folder) / "board.html"
    page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(address)}">', "utf-8")
    return page.as_uri()


def _open_runs(opened: Callable[[], "Board"], show: Callable[[], None], asked: Event | None) -> "ASGIApp":
    """Open the runs; if ``asked`` is given, the page is shown first, and the event tells when it needs the runs."""
    if asked:
        show()
        asked.wait(UNASKED)
    board = opened()
    if not asked:
        show()
    _note(board)
    return _made_ready(board)


def _opened(paths: Sequence[str], wait: bool, allow_remote: bool, closing: Event) -> "Board":
    from cavesson.process_limits import REUSED, many_files, small_process

    small_process(REUSED)
    many_files()
    from cavesson.board.folders import is_folder_of_runs, run_folders
    from cavesson.board.runs import Board, open_run

    # With --wait, an empty folder is to become a run.
    folders = [path for path in paths if is_folder_of_runs(path) and (not wait or run_folders(Path(path)))]
    runs = [open_run(path, wait, allow_remote) for path in paths if path not in folders]
    return Board(runs, closing, allow_remote, [Path(path) for path in folders])


def _note(board: "Board") -> None:
    if board.folders and not board.listed():
        print(f"note     there is no run in {visible(str(board.folders[0]))} yet; each appears once it starts")
    for run in board.runs:
        if not run.record.info:
            print(f"note     {visible(str(run.record.folder))} is not a run yet; it appears once it starts")
    if not (STATIC / "index.html").is_file():
        print(f"note     {NO_PAGE}")


def _made_ready(board: "Board") -> "ASGIApp":
    """Return the application that handles requests, and start what can wait until after the first responses."""
    from cavesson.board.server import create_api

    # Runs that are already indexed can be shown at once, so the page takes priority.
    indexed = all(run.snapshot().rows for run in board.runs)
    _later(WARM_AFTER if indexed else 0, partial(_index, board))
    _later(WARM_AFTER, board.warm)
    gc.freeze()  # exempts imported objects from garbage collection, which would otherwise delay responses now and then
    return create_api(board)


def _index(board: "Board") -> None:
    from cavesson.board.indexing import Indexing

    indexing = Indexing(board.allow_remote)
    board.follow(lambda run: indexing.add(run.record.folder, run.folder))


def _later(seconds: float, act: Callable[[], object]) -> None:
    timer = Timer(seconds, act)
    timer.daemon = True
    timer.start()


class _Server(uvicorn.Server):
    """Ends open event streams at shutdown; they would otherwise never end."""

    def __init__(self, app: "ASGIApp", closing: Event) -> None:
        config = uvicorn.Config(
            app,
            log_level="error",  # client errors are reported to the client and must not fill the terminal
            server_header=False,
            lifespan="off",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=GRACE,
            h11_max_incomplete_event_size=MAX_HEAD,
        )
        logging.getLogger("asyncio").addFilter(Seldom())
        # What an open page still asks for after the grace period is cut off, which is not worth a line to the user.
        logging.getLogger("uvicorn.error").addFilter(lambda record: "shutdown exceeded" not in str(record.msg))
        super().__init__(config)
        self.closing = closing

    def stop_without(self, runs: "Future[ASGIApp]") -> None:
        """Stop if the runs could not be opened."""
        if runs.exception():
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.closing.set()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    if not host:
        raise UserError("--host is empty: give an address, such as 127.0.0.1; 0.0.0.0 listens on all addresses")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
        # Inherited by every connection: without it, the end of a short response waits 40 ms for an acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --port") from None


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
