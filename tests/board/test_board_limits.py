"""The board under requests that are too many, too heavy or never finished: a real server, real connections."""

import csv
import io
import json
import logging
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from board_helpers import ORIGIN, board_of, client_of
from browser_helpers import BoardProcess, wait_for
from index_helpers import new_run, record
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cavesson.board import connections
from cavesson.board.connections import MAX_CONNECTIONS, REQUEST_SECONDS, Connection, Seldom

SLOW = "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("limits") / "run")
    record(folder, range(3))
    return folder


@pytest.fixture(scope="module")
def served(run):
    with BoardProcess(run) as board:
        yield board


def read_json(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


def ask(board: BoardProcess, query: str) -> tuple[int, Any, float]:
    """Return status and answer of a query, and how many seconds that took."""
    body = json.dumps({"query": query}).encode()
    headers = {"origin": board.address, "content-type": "application/json"}
    request = urllib.request.Request(f"{board.address}/api/runs/run/sql", body, headers)
    began = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=90) as answer:
            return answer.status, json.load(answer), time.monotonic() - began
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), time.monotonic() - began


@pytest.mark.slow
def test_slow_queries_delay_nothing_else(served):
    ended: list[tuple[int, Any, float]] = []
    threads = [threading.Thread(target=lambda: ended.append(ask(served, SLOW))) for _ in range(40)]
    for thread in threads:
        thread.start()
    waits = []
    while any(thread.is_alive() for thread in threads):
        began = time.monotonic()
        assert served.json("api/runs/run/rows?limit=5")["total"] == 18
        waits.append(time.monotonic() - began)
        time.sleep(0.2)
    assert sorted(waits)[len(waits) // 2] < 4 and max(waits) < 9, waits  # a query ends after 10 s
    refused = [(answer, seconds) for status, answer, seconds in ended if status == 503]
    assert len(refused) >= 34 and {answer["error"].split(":")[0] for answer, _ in refused} == {
        "the board is busy with other queries"
    }
    assert max(seconds for _, seconds in refused) < 10
    stopped = [answer["error"] for status, answer, _ in ended if status == 400]
    assert stopped and all("10 s, which is its limit" in error for error in stopped)
    assert len(stopped) + len(refused) == 40
    assert ask(served, "SELECT 1")[0] == 200


def opened(board: BoardProcess, sent: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", board.port), timeout=30)
    connection.sendall(sent)
    return connection


HALF = [b"", b"GET /api/runs HTT", b"GET /api/runs HTTP/1.1\r\nhost: 127.0.0.1\r\nx: "]


@pytest.mark.slow
def test_connections_that_send_half_a_request_are_ended_and_stop_nobody(run):
    with BoardProcess(run) as board:
        began = time.monotonic()
        held = [opened(board, HALF[i % len(HALF)]) for i in range(3 * MAX_CONNECTIONS)]
        for _ in range(5):
            asked = time.monotonic()
            assert board.json("api/runs")[0]["rollouts"] == 18
            assert time.monotonic() - asked < 8
        # selectors, not select(): its numbers of open files end at 1,024, and other tests have files open too
        with selectors.DefaultSelector() as selector:
            for connection in held:
                selector.register(connection, selectors.EVENT_READ)
            closed = selector.select(timeout=0)
        assert len(held) - len(closed) <= MAX_CONNECTIONS  # the first made room for the last
        body = opened(board, b"")
        host = f"127.0.0.1:{board.port}"
        head = f"PUT /api/runs/run/labels/0/0 HTTP/1.1\r\nhost: {host}\r\norigin: http://{host}\r\n"
        body.sendall(f"{head}content-type: application/json\r\ncontent-length: 100\r\n\r\n{{".encode())
        for connection in held:
            assert ended(connection)
        assert time.monotonic() - began < REQUEST_SECONDS + 20
        assert b"HTTP/1.1 408" in body.recv(1000)
        for _ in range(2_000):
            with opened(board, b"\x00nonsense\r\n\r\n"):
                pass
        wait_for(lambda: board.json("api/runs"))
    # The context asserts that nothing was written to the terminal.


def ended(connection: socket.socket) -> bool:
    try:
        with connection:
            return connection.recv(1) == b""
    except ConnectionResetError:
        return True


SIZE = 20 << 20


async def large(request: Request) -> Response:
    return Response(b"x" * SIZE)


@contextmanager
def serving_large() -> Iterator[tuple[int, uvicorn.Server]]:
    """A server of this process with a large answer, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = Starlette(routes=[Route("/", large)])
    server = uvicorn.Server(uvicorn.Config(app, http=Connection, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def read(connection: socket.socket, pause: float) -> int:
    """Count what comes, a megabyte at a time, until the connection ends."""
    count = 0
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 20):
            count += len(piece)
            time.sleep(pause)
    return count


@pytest.mark.slow
def test_who_reads_nothing_of_an_answer_is_disconnected_and_who_reads_slowly_is_not(monkeypatch):
    monkeypatch.setattr(connections, "READING_SECONDS", 2.0)
    request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with serving_large() as (port, server):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as idle:
            idle.sendall(request)
            wait_for(lambda: server.server_state.connections, 30)
            wait_for(lambda: not server.server_state.connections, 30)
            assert read(idle, 0) < SIZE
        with socket.create_connection(("127.0.0.1", port), timeout=30) as slow:
            began = time.monotonic()
            slow.sendall(request)
            assert read(slow, 0.25) > SIZE and time.monotonic() - began > 2 * connections.READING_SECONDS


@pytest.mark.slow
def test_a_server_without_room_for_files_says_so_once(run):
    command = f"ulimit -n 110; exec {sys.executable} -m cavesson board '{run}' --port 0 --no-browser --no-token"
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = urlsplit(process.stdout.readline().split()[-1]).port
        held = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(120)]
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        process.wait(30)
        for connection in held:
            connection.close()
    finally:
        process.kill()
        _, errors = process.communicate(timeout=60)
    assert errors.count("out of system resource") <= 1 and len(errors.splitlines()) < 60, errors[:2000]


@pytest.mark.slow
def test_the_usual_limit_of_open_files_is_raised(tmp_path):
    runs = [new_run(tmp_path / str(i)) for i in range(24)]
    for each in runs:
        record(each, [0])
    paths = " ".join(f"'{each}'" for each in runs)
    command = f"ulimit -S -n 64; exec {sys.executable} -m cavesson board {paths} --port 0 --no-browser --no-token"
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1].rstrip("/")
        wait_for(lambda: all(each["indexed"] == 1 and each["steps"] for each in read_json(f"{address}/api/runs")))
        for number in range(len(runs)):
            assert read_json(f"{address}/api/runs/{number}/rows")["total"] == 6
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert errors == ""


def test_the_same_line_is_logged_once_a_minute():
    seldom = Seldom()
    lines = [logging.LogRecord("asyncio", logging.ERROR, "", 0, text, (), None) for text in ("a", "b", "a", "b", "a")]
    assert [seldom.filter(line) for line in lines] == [True, True, False, False, False]


@pytest.mark.parametrize("name", ["run", "step", "sample"])
def test_a_body_does_not_override_the_address(run, name):
    client = client_of(board_of(run))
    answer = client.put("/api/runs/run/labels/1/1", json={"name": "star", name: 0}, headers=ORIGIN)
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"{name} is given twice")
    assert client.post("/api/runs/run/sql", json={"query": "SELECT 1", "run": 7}, headers=ORIGIN).status_code == 400
    assert client.get("/api/runs/run/labels").json() == []


def test_formulas_are_texts_in_csv_and_numbers_are_numbers(tmp_path):
    formulas = [
        "=1+1",
        "+1",
        "-1",
        "@SUM(A1)",
        "\t1",
        "\r=1",
        "\r1",
        "\n1",
        '=cmd|"/c calc"!A1',
        "-0.5",
        " =1",
        "'=1",
        "＝1",
    ]
    texts = ["plain = text", "", "'1 = 1'", "a\r=1"]
    folder = new_run(tmp_path / "run")
    both = [*formulas, *texts]
    record(folder, [0], batch=len(both), response=both, reward=[-1.5] * len(both))
    answer = client_of(board_of(folder)).get("/api/runs/run/export", params={"format": "csv"})
    rows = list(csv.DictReader(io.StringIO(answer.text, newline="")))
    assert {row["reward"] for row in rows} == {"-1.5"}
    assert [row["response"] for row in rows] == [f"'{text}" for text in formulas] + texts
