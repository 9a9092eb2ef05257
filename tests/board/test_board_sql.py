"""Queries on the board: the tables and examples that it offers, its limits, and what it does not allow."""

import json
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from board_helpers import ORIGIN, board_of, client_of
from browser_helpers import BoardProcess, record_run
from episode_helpers import record_episodes
from index_helpers import add_rewards, new_run
from starlette.testclient import TestClient

import cavesson
from cavesson.board.column_texts import LANGUAGES
from cavesson.board.sql_examples import ALWAYS, HELD_OUT
from cavesson.record import Recorder
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS

I18N = Path(__file__).parents[2] / "src/cavesson/board/web/src/i18n"
SLOW = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with held-out prompts, a vocabulary, and rewards that were computed again."""
    folder = record_run(tmp_path_factory.mktemp("sql") / "run", steps=3)
    add_rewards(folder, "tone", range(3), lambda rows: [-value for value in rows["reward"].to_pylist()])
    return folder


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return client_of(board_of(run))


def ask(client: TestClient, query: str, **more: Any) -> Any:
    answer = client.post("/api/runs/run/sql", json={"query": query, **more}, headers=ORIGIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tables_of(client: TestClient) -> dict[str, dict[str, Any]]:
    answer = client.get("/api/runs/run/tables").json()
    return {one["name"]: {column["name"]: column for column in one["columns"]} for one in answer["tables"]}


def test_the_tables_have_the_columns_that_have_values(client, run):
    opened = cavesson.open(run)
    tables = tables_of(client)
    assert set(tables) == {"rows", "tokens", "steps", "rollups", "vocabulary", "rescored"}
    for name, declared in (("rows", ROW_COLUMNS), ("tokens", TOKEN_COLUMNS)):
        lines = opened.arrow(name)
        measured = [one.name for one in declared if lines[one.name].null_count < len(lines)]
        assert list(tables[name]) == measured and 10 < len(measured) < len(declared)
        for column in declared:
            if column.name in measured:
                assert tables[name][column.name]["doc"]["en"] == column.doc
    assert set(tables["steps"]) == {"step", "attempt", "kl/objective", "odd/{name}", "optim/grad_norm"}
    for name in tables:
        described = ask(client, f"DESCRIBE SELECT * FROM {name}")
        assert set(tables[name]) <= {row[0] for row in described["rows"]}, name


def test_every_meaning_is_there_in_every_language(client, tmp_path):
    episodes = client_of(board_of(record_episodes(tmp_path / "run", steps=2)))
    for tables in (tables_of(client), tables_of(episodes)):
        for name, columns in tables.items():
            for column in columns.values():
                wanted = {"en", *LANGUAGES} if column["doc"] else set()
                assert set(column["doc"]) == wanted, (name, column)
                assert len(set(column["doc"].values())) in (len(wanted), 1), (name, column)
    for column in (*ROW_COLUMNS, *TOKEN_COLUMNS):
        assert all(column.doc in (I18N.parents[2] / f"languages/{one}.toml").read_text("utf-8") for one in LANGUAGES)


def test_every_example_works_and_has_a_title_in_every_language(client):
    examples = client.get("/api/runs/run/tables").json()["examples"]
    names = [one["name"] for one in examples]
    assert set(names) == {one.name for one in (*ALWAYS, HELD_OUT)} - {"tools"} | {"metrics"}
    for one in examples:
        answer = ask(client, one["query"])
        assert answer["rows"] and len(answer["columns"]) > 1, one
    titles = [(I18N / f"{language}.ts").read_text("utf-8") for language in ("en", *LANGUAGES)]
    for name in [*names, "tools"]:
        assert all(f"  example_{name}: " in text for text in titles), name
    for name in (*tables_of(client), "turns"):
        assert all(f"  table_{name}: " in text for text in titles), name


def test_a_run_is_offered_only_what_it_has(tmp_path):
    folder = new_run(tmp_path / "run")
    with Recorder(folder) as recorder:
        recorder.rollouts(0, {"sample": [0, 1], "prompt": ["p", "q"], "response": ["a", "b"], "reward": [1.0, 2.0]})
    client = client_of(board_of(folder))
    assert set(tables_of(client)) == {"rows", "rollups"}
    examples = client.get("/api/runs/run/tables").json()["examples"]
    assert [one["name"] for one in examples] == ["reward", "best", "prompts"]
    assert all(ask(client, one["query"])["rows"] for one in examples)
    tools = client_of(board_of(record_episodes(tmp_path / "other" / "run", steps=2)))
    assert "tools" in [one["name"] for one in tools.get("/api/runs/run/tables").json()["examples"]]


def test_a_run_that_has_recorded_nothing_has_no_tables(tmp_path):
    client = client_of(board_of(new_run(tmp_path / "run")))
    got = client.get("/api/runs/run/tables").json()
    assert (got["tables"], got["examples"]) == ([], [])


def test_examples_say_what_slow_loops_say(client, run):
    rows = cavesson.open(run).rows().to_pylist(maps_as_pydicts="strict")
    examples = {one["name"]: one["query"] for one in client.get("/api/runs/run/tables").json()["examples"]}

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    got = ask(client, examples["held_out"])
    for step, trained, held_out in got["rows"]:
        of = {split: [row["reward"] for row in rows if (row["step"], row["split"]) == (step, split)]
              for split in ("train", "eval")}  # fmt: skip
        assert (trained, held_out) == pytest.approx((mean(of["train"]), mean(of["eval"])))
    parts = {(step, part): score for step, part, score in ask(client, examples["parts"])["rows"]}
    assert len(parts) == 6
    for (step, part), score in parts.items():
        own = [row["reward_parts"][part] for row in rows if row["step"] == step and row["split"] == "train"]
        assert score == pytest.approx(mean(own))
    again = ask(client, examples["rescored"])
    assert {line[1] for line in again["rows"]} == {"tone"}
    assert all(line[2] == pytest.approx(-line[3]) for line in again["rows"])


def test_the_limit_of_lines_is_told(client):
    got = ask(client, "SELECT * FROM range(20)", limit=10)
    assert [line[0] for line in got["rows"]] == list(range(10)) and got["truncated"]
    assert not ask(client, "SELECT * FROM range(20)", limit=20)["truncated"]
    assert len(ask(client, "SELECT * FROM range(20000)", limit=10_000)["rows"]) == 10_000
    refused = client.post("/api/runs/run/sql", json={"query": "SELECT 1", "limit": 10_001}, headers=ORIGIN)
    assert refused.status_code == 422


def test_values_arrive_as_they_are_or_as_texts(client):
    values = {
        "1": 1, "true": True, "1.5": 1.5, "'a'": "a", "NULL": None, "9007199254740992": 2**53,
        "9007199254740993": "9007199254740993", "[1, 2]": "[1, 2]", "map {'k': 1}": '{"k": 1}',
        "date '2020-01-31'": "2020-01-31", "'nan'::DOUBLE": None,
        "12345678901234567890.5::DECIMAL(38, 1)": "12345678901234567890.5",
    }  # fmt: skip
    got = ask(client, "SELECT " + ", ".join(values))["rows"][0]
    assert dict(zip(values, got, strict=True)) == values


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_text('{outside}')",
        "SELECT * FROM read_csv('{outside}')",
        "SELECT * FROM '{outside}'",
        "SELECT * FROM glob('/*')",
        "SELECT * FROM read_blob('{folder}/run.json')",
        "COPY (SELECT 1) TO '{outside}'",
        "ATTACH '{outside}' AS x",
        "CREATE TABLE x AS SELECT 1",
        "INSERT INTO rows SELECT * FROM rows",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT 1; DROP VIEW rows",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{outside}''')",
    ],
)
def test_nothing_but_the_record_is_read_and_nothing_is_written(client, run, tmp_path, query):
    outside = tmp_path / "outside.csv"
    outside.write_text("unseen")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    text = query.format(outside=outside, folder=run)
    answer = client.post("/api/runs/run/sql", json={"query": text}, headers=ORIGIN)
    assert answer.status_code == 400 and "unseen" not in answer.text and "\n" not in answer.json()["error"]
    assert outside.read_text() == "unseen"
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_an_error_names_its_place(client):
    answer = client.post("/api/runs/run/sql", json={"query": "SELECT step,\n  rewrd FROM rows"}, headers=ORIGIN)
    assert answer.json()["error"].startswith('line 2, column 3: Referenced column "rewrd" not found')


def test_a_query_ends_when_its_client_closes_the_connection(run):
    """Two queries run at once: a third one is answered soon once one of the slow ones has been given up."""
    with BoardProcess(run) as board:
        waiting = [_sent(board, SLOW) for _ in range(2)]
        time.sleep(1.5)
        began = time.monotonic()
        for connection in waiting:
            connection.close()
        with _sent(board, "SELECT 42") as connection:
            answer = connection.makefile("rb").read()
        assert b"42" in answer and time.monotonic() - began < 8, "by themselves, they end after ten seconds"


def test_the_longest_query_fits_into_an_address(run):
    with BoardProcess(run) as board:
        address = f"{board.address}/sql?{urlencode({'query': 'é' * 20_000})}"
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.status == 200 and b"<html" in answer.read()


def _sent(board: BoardProcess, query: str) -> socket.socket:
    body = json.dumps({"query": query})
    lines = [
        "POST /api/runs/run/sql HTTP/1.1", f"host: 127.0.0.1:{board.port}", f"origin: {board.address}",
        "content-type: application/json", f"content-length: {len(body)}", "connection: close",
    ]  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", board.port), timeout=30)
    connection.sendall(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    return connection
