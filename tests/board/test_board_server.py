import asyncio
import csv
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from board_helpers import ORIGIN, board_of, client_of
from index_helpers import indexed, new_run, record, rows_of, tokens_of

import cavesson.record
from cavesson.board.api import ENDPOINTS
from cavesson.board.live import EventsQuery, events
from cavesson.board.runs import Board
from cavesson.board.server import json_response
from cavesson.index.build import Builder
from cavesson.record import Recorder, begin_attempt, write_vocabulary
from cavesson.record.storage import Remote


@pytest.fixture
def own(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(3))
    return folder


def test_labels_survive_a_restart(own):
    client = client_of(board_of(own))
    text = "\x00 <b> 🙂 ../"
    for step, sample, name, value in (
        (1, 2, "star", None),
        (1, 2, "note", "look"),
        (0, 5, "star", None),
        (2, 1, "note", text),
    ):
        label = {"name": name, "value": value, "author": "Ann"}
        answer = client.put(f"/api/runs/run/labels/{step}/{sample}", json=label, headers=ORIGIN).json()
        assert label in [{key: one[key] for key in label} for one in answer["labels"]]
    again = {"name": "note", "value": "again", "author": "Ann"}
    assert client.put("/api/runs/run/labels/1/2", json=again, headers=ORIGIN).status_code == 200
    assert client.put("/api/runs/run/labels/9/9", json=again, headers=ORIGIN).status_code == 404
    removed = {"name": "star", "removed": True}
    assert client.put("/api/runs/run/labels/0/5", json=removed, headers=ORIGIN).json()["labels"] == []
    client = client_of(board_of(own))
    found = client.get("/api/runs/run/labels").json()
    assert [(one["step"], one["sample"], [label["value"] for label in one["labels"]]) for one in found] == [
        (1, 2, [None, "again"]),
        (2, 1, [text]),
    ]
    assert all(label["author"] == "Ann" and label["time"].endswith("Z") for one in found for label in one["labels"])
    (row,) = client.get("/api/runs/run/rows", params={"starred": 1}).json()["rows"]
    assert row["labels"] == found[0]["labels"] == client.get("/api/runs/run/rollouts/1/2").json()["labels"]
    assert len((own / "labels.jsonl").read_text().splitlines()) == 6


def test_stars_of_earlier_versions_are_labels(own):
    (own / "stars.json").write_text(json.dumps({"stars": [{"step": 1, "sample": 2, "note": "old"}]}))
    client = client_of(board_of(own))

    def names():
        return [label["name"] for one in client.get("/api/runs/run/labels").json() for label in one["labels"]]

    assert names() == ["star", "note"]
    client.put("/api/runs/run/labels/1/2", json={"name": "star", "removed": True}, headers=ORIGIN)
    assert names() == ["note"]


def test_half_a_surrogate_pair_in_a_note_is_refused_plainly(own):
    body = b'{"name": "note", "value": "\\ud800"}'
    headers = ORIGIN | {"content-type": "application/json"}
    answer = client_of(board_of(own)).put("/api/runs/run/labels/1/2", content=body, headers=headers)
    assert answer.status_code == 400 and not (own / "labels.jsonl").exists()


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_an_export_holds_what_the_selection_means(own, form):
    client = client_of(board_of(own))
    parameters = {"format": form, "filter": "length > 3", "sort": "-reward", "steps": "1-2"}
    answer = client.get("/api/runs/run/export", params=parameters)
    assert answer.status_code == 200 and f'filename="run.{form}"' in answer.headers["content-disposition"]
    table = cavesson.record.open(own).rows(steps=[1, 2]).to_pylist(maps_as_pydicts="strict")
    wanted = sorted((t for t in table if t["length"] > 3), key=lambda t: -t["reward"])
    if form == "csv":
        got = list(csv.DictReader(io.StringIO(answer.text, newline="")))
        assert [json.loads(row["reward_parts"]) for row in got] == [t["reward_parts"] for t in wanted]
    elif form == "jsonl":
        got = [json.loads(line) for line in answer.text.splitlines()]
        assert got == [{k: v for k, v in t.items() if v is not None} for t in wanted]
    else:
        got = pq.read_table(io.BytesIO(answer.content)).to_pylist(maps_as_pydicts="strict")
        assert got == wanted
    assert [(float(row["reward"]), row["response"]) for row in got] == [(t["reward"], t["response"]) for t in wanted]
    assert 2 < len(got) < 12


def test_numbers_that_are_not_finite_are_null():
    content = {"a": float("nan"), "b": np.array([1.5, np.inf, -np.inf]), "c": np.array([0.1], np.float32)}
    assert orjson.loads(json_response(content).body) == {"a": None, "b": [1.5, None, None], "c": [0.1]}


def test_what_json_hardly_can_say_is_said(tmp_path):
    folder = new_run(tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"name": "\ud800 half", "seed": 2**80, "nan": float("nan")}))
    client = client_of(board_of(folder))
    info = json.loads(client.get("/api/runs/run/info").text)
    assert info == {"name": "\ud800 half", "seed": 2**80, "nan": None}


def test_a_run_that_is_not_on_this_machine_is_indexed_in_the_cache(own, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    board = Board([cavesson.record.open(Remote(f"file://{own}"))])
    folder = board.runs[0].folder
    assert folder.is_relative_to(tmp_path / "cache")
    builder = Builder(board.runs[0].record, folder)
    while builder.update() or builder.advance():
        pass
    client = client_of(board)
    assert client.get("/api/runs/run/rows").json()["total"] == 18
    assert client.put("/api/runs/run/labels/1/2", json={"name": "star"}, headers=ORIGIN).status_code == 200
    assert not (own / "index").exists() and not (own / "labels.jsonl").exists()
    board.scanner.stop()


def test_the_board_needs_no_torch():
    code = "import sys, cavesson.board.serve\nassert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_rewards_that_are_not_finite_are_shown_as_missing(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, [0], reward=np.array([1.0, np.nan, np.inf, -np.inf, 2.0, 3.0]))
    client = client_of(board_of(folder))
    rows = client.get("/api/runs/run/rows").json()["rows"]
    assert [row["reward"] for row in rows] == [1.0, None, None, None, 2.0, 3.0]
    got = client.get("/api/runs/run/histogram", params={"bins": 2}).json()
    assert sum(got["counts"]) == 3 and got["missing"] == 3
    for path in ("series", "ridge", "patterns", "groups?step=0", "rollouts/0/2", "rows?sort=-reward"):
        assert client.get(f"/api/runs/run/{path}").status_code == 200, path


def test_sql_is_limited_to_reading(own):
    client = client_of(board_of(own))

    def ask(query):
        return client.post("/api/runs/run/sql", json={"query": query}, headers=ORIGIN)

    got = ask("SELECT step, count(*) AS n FROM rows GROUP BY step ORDER BY step").json()
    assert got["columns"] == ["step", "n"] and got["rows"] == [[0, 6], [1, 6], [2, 6]] and not got["truncated"]
    for query in ("DROP TABLE rows", "COPY rows TO '/tmp/x.csv'", "SELECT * FROM read_text('/etc/passwd')", "SELEC 1"):
        answer = ask(query)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"], query


async def first_events(board, after, count, act=lambda: None):
    stream = events(board, EventsQuery(after=after)).body_iterator
    found = []
    async with asyncio.timeout(30):
        async for chunk in stream:
            if chunk.startswith(b"retry"):
                act()
            if chunk.startswith(b"id: "):
                head, data = chunk.decode().split("\n")[:2]
                event = json.loads(data.removeprefix("data: "))
                assert head == f"id: {event['cursor']}"
                found.append(event)
            if len(found) == count:
                await stream.aclose()
                return found


def test_events_tell_what_was_added(own):
    board = board_of(own)
    (event,) = asyncio.run(first_events(board, "", 1, lambda: (record(own, [3, 4], attempt=0), indexed(own))))
    assert event["run"] == "run" and event["steps"] == [3, 4] and event["rollouts"] == 30
    # Whoever was away for a while gets at once what came meanwhile.
    (missed,) = asyncio.run(first_events(board, "run=18.0.1.18.1.0", 1))
    assert missed["steps"] == [3, 4] and missed["cursor"] == event["cursor"]
    for cursor in ("nonsense", "run=1.2.3,x=4.5.6", "run=1.2", ",", "other=9.9.9.9.9.9", "run=x.1.1.1.1.1"):
        asyncio.run(first_events(board, cursor, 0))  # begins without an error


def test_an_event_says_that_a_run_was_resumed(own):
    board = board_of(own)

    def resume():
        record(own, [1], attempt=begin_attempt(own, 1))
        indexed(own)

    (resumed,) = asyncio.run(first_events(board, "", 1, resume))
    assert resumed["restarted"] and resumed["rollouts"] == 12  # step 2 of the first attempt is no longer read
    (summary,) = client_of(board).get("/api/runs").json()
    assert summary["steps"] == [0, 1] and summary["newest"] == 1
    (grown,) = asyncio.run(first_events(board, "", 1, lambda: (record(own, [2], attempt=1), indexed(own))))
    assert not grown["restarted"] and grown["rollouts"] == 18


def test_metrics_that_come_after_the_rollouts_of_their_step_are_an_event_too(own):
    board = board_of(own)
    client = client_of(board)
    with Recorder(own, attempt=0) as recorder:
        recorder.rollouts(3, rows_of(3, 6), tokens_of(3, 6))
        recorder.flush()
        indexed(own)

        def later():
            recorder.metrics(3, {"loss": 0.25})
            recorder.flush()
            indexed(own)

        (event,) = asyncio.run(first_events(board, "", 1, later))
    assert event["steps"] is None and event["rollouts"] == 24
    got = client.get("/api/runs/run/series", params={"names": "loss,reward", "steps": "3-999999999"}).json()
    assert got["metrics"]["loss"] == [0.25] and got["rollups"]["reward"]["count"] == [6]


def test_another_run_that_is_begun_in_the_same_place_is_shown(own):
    board = board_of(own)
    client = client_of(board)
    for path in ("rows?sort=-reward", "series", "never-beats", "prompts", "compare"):
        client.get(f"/api/runs/run/{path}")
    shutil.rmtree(own)
    new_run(own, {"algorithm": "dpo"})
    rewards = np.array([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])
    record(own, range(3), reward=rewards, response=["another"] * 6)
    indexed(own)
    rows = client.get("/api/runs/run/rows?sort=-reward&limit=3").json()["rows"]
    assert [(row["sample"], row["reward"], row["response"]) for row in rows] == [(3, 6.0, "another")] * 3
    assert client.get("/api/runs").json()[0]["algorithm"] == "dpo"
    assert client.get("/api/runs/run/rollouts/0/3").json()["response"] == "another"
    assert client.get("/api/runs/run/series?names=reward").json()["rollups"]["reward"]["mean"] == [3.5] * 3


def test_an_empty_run_has_an_answer_for_everything(tmp_path):
    folder = new_run(tmp_path / "run")
    client = client_of(board_of(folder))
    (run,) = client.get("/api/runs").json()
    assert run["steps"] is None and run["rollouts"] == 0
    for path in (
        "rows",
        "series",
        "hits?q=x",
        "never-beats",
        "prompts",
        "prompts?solved=1",
        f"prompts/{'0' * 16}",
        "patterns",
        "groups?step=0",
        "labels",
        "rows?filter=reward>1",
    ):
        answer = client.get(f"/api/runs/run/{path}")
        assert answer.status_code in (200, 400, 404), (path, answer.text)
    assert client.get("/api/runs/run/histogram").json() == {
        "error": "nothing is indexed yet: the run has just been opened, or has no rollouts"
    }


def test_the_description_names_every_request_and_parameter(client):
    described = client.get("/api/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    operations = [op for path in described["paths"].values() for op in path.values()]
    assert len(operations) == len(ENDPOINTS) and all(op["summary"] for op in operations)
    for path, methods in described["paths"].items():
        for op in methods.values():
            named = {p["name"] for p in op["parameters"] if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert all(p["description"] for p in op["parameters"]), path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def fetch(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except urllib.error.URLError:
        return None, b""


def wait_for(test, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := test()) is not None:
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def start_board(*arguments, token=("--no-token",)):
    command = [sys.executable, "-m", "cavesson", "board", *map(str, arguments), "--no-browser", *token]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_follows_a_run_and_ends_cleanly(own):
    port = free_port()
    process = start_board(own, "--port", port)
    try:
        assert process.stdout.readline().split() == ["board", f"http://127.0.0.1:{port}/"]

        def rollouts():
            status, body = fetch(f"http://127.0.0.1:{port}/api/runs")
            return json.loads(body)[0]["rollouts"] if status == 200 else None

        wait_for(lambda: rollouts() == 18 or None)
        record(own, [3], attempt=0)
        wait_for(lambda: rollouts() == 24 or None)
        listening = urllib.request.urlopen(f"http://127.0.0.1:{port}/api/events", timeout=10)
        assert listening.readline() == b"retry: 1000\n"
        children = [
            int(pid) for pid in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True).stdout.split()
        ]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and not errors, errors
        wait_for(lambda: not any(is_alive(child) for child in children) or None, 20)
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("busy", ["/api/events", "sql"])
def test_it_ends_soon_whatever_it_is_asked_meanwhile(own, busy):
    port = free_port()
    process = start_board(own, "--port", port)
    try:
        wait_for(lambda: fetch(f"http://127.0.0.1:{port}/api/runs")[0])
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            if busy == "sql":
                body = json.dumps({"query": "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"})
                head = f"POST /api/runs/run/sql HTTP/1.1\r\norigin: http://127.0.0.1:{port}"
                head += f"\r\ncontent-type: application/json\r\nhost: 127.0.0.1:{port}"
                request = f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}"
            else:
                request = f"GET {busy} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n"
            connection.sendall(request.encode())
            if busy == "sql":
                time.sleep(1)
            else:
                assert connection.recv(12) == b"HTTP/1.1 200"
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
            assert time.monotonic() - started < 8  # at 9 the query ends by itself
    finally:
        process.kill()
        process.communicate(timeout=60)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_run_that_is_not_there_yet_appears(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, empty = tmp_path / "later", tmp_path / "empty"
    empty.mkdir()
    port = free_port()
    process = start_board(folder, empty, "--port", port, "--wait")
    address = f"http://127.0.0.1:{port}"
    try:
        assert [process.stdout.readline().split()[0] for _ in range(3)] == ["board", "note", "note"]
        wait_for(lambda: fetch(f"{address}/api/runs")[0])
        first, second = json.loads(fetch(f"{address}/api/runs")[1])
        assert first["rollouts"] == 0 and first["name"] == "later" and first["problem"] is None
        assert second["rollouts"] == 0
        assert not folder.exists() and not any(empty.iterdir()), "a recorder wants to find nothing there"
        stream = urllib.request.urlopen(f"{address}/api/events", timeout=60)
        new_run(folder, {"algorithm": "ppo"})
        write_vocabulary(folder, ["x"] * 50, ["y"] * 50)
        record(folder, range(2))
        deadline = time.monotonic() + 90
        while not (line := stream.readline()).startswith(b"data:"):
            assert time.monotonic() < deadline
        assert json.loads(line[5:])["run"] == "later"
        wait_for(lambda: json.loads(fetch(f"{address}/api/runs")[1])[0]["rollouts"] == 12 or None)
        assert json.loads(fetch(f"{address}/api/runs")[1])[0]["algorithm"] == "ppo"
        texts = json.loads(fetch(f"{address}/api/runs/later/rollouts/1/2/texts")[1])["texts"]
        assert set(texts) == {"y"}
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_an_open_address_gets_a_token_and_says_so(own):
    port = free_port()
    process = start_board(own, "--host", "0.0.0.0", "--port", port, token=())
    try:
        address, warning = process.stdout.readline(), process.stdout.readline()
        token = address.split("token=")[1].strip()
        assert len(token) >= 32 and "needs the token" in warning
        wait_for(lambda: fetch(f"http://127.0.0.1:{port}/api/runs")[0])
        assert fetch(f"http://127.0.0.1:{port}/api/runs")[0] == 401
        assert fetch(f"http://127.0.0.1:{port}/api/runs", Authorization=f"Bearer {token}")[0] == 200
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_mistakes_on_the_command_line_are_one_or_two_plain_lines(tmp_path, own):
    inside = own / "record"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, says in (
            ((tmp_path / "none" / "of" / "these", "--port", 0), ["is not a run folder", "--wait"]),
            ((own, tmp_path / "none", "--port", 0), ["is not a run folder", "--wait"]),
            ((inside, "--port", 0), [f"is not a run folder: it has no run.json; runs nearby: {own}"]),
            ((inside, "--wait", "--port", 0), ["is not a run folder: it has no run.json"]),
            ((own, "--port", port), [f"port {port}"]),
        ):
            process = start_board(*arguments)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 2 and all(part in errors for part in says), errors
            assert len(errors.strip().splitlines()) == 1 + ("--wait" in says), errors
