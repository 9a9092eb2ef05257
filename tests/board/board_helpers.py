"""Runs, boards and clients for the tests of the server."""

import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parent.parent / "index"))

from index_helpers import indexed

import cavesson.record
from cavesson.board.runs import Board
from cavesson.board.security import Guard
from cavesson.board.server import create_api
from cavesson.board.site import Site

HOST = "127.0.0.1:6008"
ORIGIN = {"origin": f"http://{HOST}"}


def board_of(*folders: Path) -> Board:
    """Open runs whose index is up to date."""
    for folder in folders:
        indexed(folder)
    return Board([cavesson.record.open(folder) for folder in folders])


def create_app(board: Board, token: str | None = None) -> Guard:
    """The board as it is served once its runs are open."""
    opened: Future[Any] = Future()
    opened.set_result(create_api(board))
    return Guard(Site(opened), token)


def client_of(board: Board, token: str | None = None, **kwargs: Any) -> TestClient:
    return TestClient(create_app(board, token), base_url=f"http://{HOST}", raise_server_exceptions=True, **kwargs)


def ask(client: TestClient, **parameters: Any) -> dict[str, Any]:
    """Ask until the answer is exact, as the page does."""
    for _ in range(400):
        answer = client.get("/api/runs/run/rows", params={"limit": 500} | parameters)
        assert answer.status_code == 200, answer.text
        got: dict[str, Any] = answer.json()
        assert got["total"] <= got["most"]
        if not got["at_most"] or got["stopped"]:
            return got
        time.sleep(0.02)
    raise AssertionError("the search does not end")
