"""Records and requests from somebody who means harm: they are shown, or refused in one line, and nothing else."""

import json
import re
import shutil
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_helpers import HOST, ORIGIN, ask, board_of, client_of, create_app
from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record, rows_of, tokens_of
from starlette.testclient import TestClient

import cavesson.record
from cavesson.board import overview
from cavesson.board import sql as sql_module
from cavesson.board.runs import Board
from cavesson.board.security import CONTENT_SECURITY_POLICY
from cavesson.errors import UserError
from cavesson.index.build import Builder
from cavesson.record import Recorder, begin_attempt, write_run

LABEL = b'{"step": 0, "sample": 0, "name": "rating", "value": %s, "author": "", "time": null}\n'

NAMES = [
    "../../etc/passwd",
    "/etc/passwd",
    "<script>alert(1)</script>",
    "\x00\x1b[31m\x07",
    "a\"b'c;\r\nset-cookie: x=1",
    "‮abc🙂 e\u0301",
    "a,b",
]
VIEWS = (
    "info", "findings", "series", "histogram", "ridge", "heat", "rows?limit=500", "rows?sort=-reward", "rows?q=a",
    "rows?q=a.%2Bb&regex=1", "hits?q=a%20b", "rollouts/0/0", "rollouts/0/0/tokens", "rollouts/0/0/texts",
    "groups?step=0", "never-beats", "patterns?kind=all", "similar/0/0", "export?format=csv", "export?format=jsonl",
    "export?format=parquet", "labels", "prompts?sort=never",
    "groups/0/0",
)  # fmt: skip
OTHERS = ("/api/runs", "/api/compare?runs=run,run", "/api/compare?runs=run@0,run@1")


def answers(client, name="run") -> dict:
    """Every answer there is about a run, each with its strict policy, and none a bug."""
    found = {}
    for path in [f"/api/runs/run/{view}" for view in VIEWS] + list(OTHERS):
        answer = client.get(re.sub(r"\brun\b", name, path))
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY, path
        assert answer.status_code < 500, (path, answer.text)
        if answer.status_code >= 400:
            assert list(answer.json()) == ["error"] and "\n" not in answer.json()["error"], path
        found[path] = answer
    return found


def files_of(folder) -> set:
    return {path.relative_to(folder) for path in folder.rglob("*")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "a\nb: c", "…%2f..%2f..", '"quoted"', "..."])
def test_whatever_a_run_and_its_columns_are_called_it_is_shown_and_no_more(tmp_path, name):
    folder = new_run(tmp_path / name, {"algorithm": NAMES[2], "model": NAMES})
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in (0, 1):
            rows = rows_of(step, 7) | {
                "split": NAMES,
                "finish_reason": NAMES,
                "reward_parts": [dict.fromkeys(NAMES, 1.0)] * 7,
                "response": NAMES,
            }
            recorder.rollouts(step, rows, tokens_of(step, 7))
            recorder.metrics(step, dict.fromkeys(NAMES, 0.5))
    before = files_of(tmp_path)
    board = board_of(folder)
    client = client_of(board)
    found = answers(client, board.runs[0].key)
    assert all(answer.status_code == 200 for answer in found.values())
    (run,) = found["/api/runs"].json()
    assert run["name"] == name and sorted(run["columns"]["parts"]) == sorted(NAMES) and run["algorithm"] == NAMES[2]
    rows = found["/api/runs/run/rows?limit=500"].json()["rows"]
    for column in ("split", "finish_reason", "response"):
        assert [row[column] for row in rows] == NAMES * 2, column
    metrics = found["/api/runs/run/series"].json()["metrics"]
    assert {name: metrics[name] for name in NAMES} == {metric: [0.5, 0.5] for metric in NAMES}
    assert metrics.keys() - NAMES == {"rows/truncated", "rows/zero_variance"}
    for part in NAMES:
        got = client.get(f"/api/runs/{run['run']}/histogram", params={"column": f"part/{part}"}).json()
        assert sum(got["counts"]) == 14, part
    disposition = found["/api/runs/run/export?format=csv"].headers["content-disposition"]
    assert disposition.count('"') == 2 and "/" not in disposition and "\n" not in disposition
    added = files_of(tmp_path) - before
    assert all(path.parts[:2] == (name, "index") for path in added), added


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["rows", "tokens", "rollups", "steps"])
@pytest.mark.parametrize("how", ["empty", "garbage", "cut", "other table", "gone", "folder", "no text"])
def test_a_broken_file_is_told_in_one_line(tmp_path, kind, how):
    folder = new_run(tmp_path / "run")
    record(folder, [0, 1])
    board = board_of(folder)
    client = client_of(board)
    file = next(path for path in sorted((folder / "record").iterdir()) if path.name.startswith(f"{kind}-"))
    content = file.read_bytes()
    file.unlink()
    if how == "folder":
        file.mkdir()
    elif how == "other table":
        pq.write_table(pa.table({"x": [1, 2], "step": ["a", "b"]}), file)
    elif how == "no text":
        _write_what_is_no_text(file, pq.read_table(pa.BufferReader(content)))
    elif how != "gone":
        file.write_bytes({"empty": b"", "garbage": b"PAR1" + b"\xff" * 100 + b"PAR1", "cut": content[:-20]}[how])
    found = answers(client)
    assert found["/api/runs"].status_code == 200
    # The same of an index that is made of such a record: it does not grow, and what is asked is answered.
    again = Board([cavesson.record.open(folder)])
    shutil.rmtree(folder / "index")
    builder = Builder(again.runs[0].record, again.runs[0].folder)
    try:
        while builder.update() or builder.advance():
            pass
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, UserError):
        pass
    answers(client_of(again))


def _write_what_is_no_text(file, table: pa.Table) -> None:
    """Write bytes that are not UTF-8 into every column of texts: half a surrogate pair, and a single byte."""
    for i, field in enumerate(table.schema):
        if field.type == pa.string():
            values = pa.array([b"\xed\xa0\x80 \xff a"] * table.num_rows, pa.binary())
            broken = pa.StringArray.from_buffers(len(values), values.buffers()[1], values.buffers()[2])
            table = table.set_column(i, field, broken)
    pq.write_table(table, file)


@pytest.mark.slow
def test_a_response_of_ten_megabytes(tmp_path):
    folder = new_run(tmp_path / "run")
    words = "Lorem ipsum <b> 好 \x1b[0m ".join(map(str, range(400_000)))
    texts = [words + " needle in the end", "x" * 10_000_000 + "yz", "short"]
    assert len(texts[0].encode()) > 10_000_000
    record(folder, [0], batch=3, response=texts, prompt=texts[::-1])
    started = time.monotonic()
    board = board_of(folder)
    client = client_of(board)
    found = answers(client, board.runs[0].key)
    assert all(answer.status_code == 200 for answer in found.values())
    rows = found["/api/runs/run/rows?limit=500"].json()["rows"]
    assert [row["response"] for row in rows] == [text[:300] for text in texts]
    got = ask(client, q="needle in the")
    (row,) = got["rows"]
    assert row["sample"] == 0 and row["response"][slice(*row["hit"])] == "needle in the"
    assert texts[0].encode("utf-16-le")[2 * row["excerpt_start"] :].startswith(row["response"].encode("utf-16-le"))
    assert [row["sample"] for row in ask(client, q="xxyz")["rows"]] == [1]
    exported = [json.loads(line) for line in found["/api/runs/run/export?format=jsonl"].text.splitlines()]
    assert [line["response"] for line in exported] == texts
    assert time.monotonic() - started < 120


def test_numbers_at_the_ends_of_what_a_number_can_be(tmp_path):
    folder = new_run(tmp_path / "run")
    big = np.array([1e308, -1e308, np.inf, -np.inf, np.nan, 5e-324])
    tokens = tokens_of(0, 6)
    tokens |= {name: np.broadcast_to(big[:, None], tokens["mask"].shape) for name in ("value", "entropy", "return")}
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        rows = {"reward": big, "ref_reward": big[::-1], "group": [2**62, -(2**62), 0, 0, 1, 1]}
        recorder.rollouts(0, rows_of(0, 6) | rows, tokens)
        recorder.rollouts(2**31 - 2, rows_of(0, 6) | rows | {"sample": 2**31 - 1 - np.arange(6)}, tokens)
        recorder.metrics(0, {"a": 1e308, "b": np.inf})
    found = answers(client_of(board_of(folder)))
    assert all(answer.status_code == 200 for answer in found.values()), {p: a.text[:200] for p, a in found.items()}


def test_a_run_in_which_nothing_is_a_number(tmp_path):
    folder = new_run(tmp_path / "run")
    nothing = np.full(6, np.nan)
    tokens = tokens_of(0, 6) | {"logprob": np.full((6, 10), np.nan), "ref_logprob": np.full((6, 10), np.nan)}
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in (0, 1):
            columns = {"reward": nothing, "ref_reward": nothing, "reward_parts": [{"a": np.nan}] * 6}
            recorder.rollouts(step, rows_of(step, 6) | columns, tokens)
            recorder.metrics(step, {"loss": np.nan})
    client = client_of(board_of(folder))
    found = answers(client)
    assert [path for path, answer in found.items() if answer.status_code != 200] == ["/api/runs/run/heat"]
    assert found["/api/runs/run/series"].json()["metrics"]["loss"] == [None, None]
    assert found["/api/runs/run/histogram"].json()["missing"] == 12
    assert [row["reward"] for row in found["/api/runs/run/rows?sort=-reward"].json()["rows"]] == [None] * 12
    assert found["/api/compare?runs=run@0,run@1"].json()["total"] == 0


def test_a_run_without_tokens(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_run(folder, {"algorithm": "imported"})
    step = pa.array([0, 0, 1, 1], pa.int32())
    rows = {"step": step, "sample": pa.array([0, 1, 0, 1], pa.int32()), "prompt": ["p", "q", "p", "q"]}
    rows |= {"response": ["a b", "b c", "c d", "d e"], "reward": [0.0, 1.0, 2.0, 3.0]}
    tokens = pa.table({"step": pa.array([], pa.int32()), "sample": pa.array([], pa.int32())})
    tokens = tokens.append_column("position", pa.array([], pa.int32()))
    cavesson.record.write_rollouts(folder, begin_attempt(folder, 0), pa.table(rows), tokens)
    client = client_of(board_of(folder))
    found = answers(client)
    refused = {path: answer.json()["error"] for path, answer in found.items() if answer.status_code != 200}
    assert refused == {"/api/runs/run/heat": "no token of the run has the column 'kl_k1'"}
    assert found["/api/runs"].json()[0]["columns"]["tokens"] == []
    rollout = found["/api/runs/run/rollouts/0/0"].json()
    assert rollout["tokens"]["count"] == 0 and rollout["tokens"]["columns"] == [] and rollout["response"] == "a b"
    assert found["/api/runs/run/rollouts/0/0/tokens"].content == b""


def test_a_bug_is_one_line_under_the_strict_policy(board, monkeypatch):
    def broken(run):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(overview, "summary", broken)
    client = TestClient(create_app(board), base_url=f"http://{HOST}", raise_server_exceptions=False)
    answer = client.get("/api/runs")
    assert answer.status_code == 500 and "secret" not in answer.text and list(answer.json()) == ["error"]
    assert "terminal" in answer.json()["error"]
    assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("stars.json", (b"", b"[]", b'{"stars": 3}', b'{"stars": [{"step": 1}]}', b"\xff", b"[" * 100_000)),
        (
            "labels.jsonl",
            (b"x\n", b"[]\n", b'{"step": 1}\n', LABEL % b"9", LABEL % b'"x"' + b"\xff\n", b"[" * 100_000 + b"\n"),
        ),
    ],
)
def test_labels_that_are_none_are_told_in_one_line(tmp_path, name, contents):
    folder = new_run(tmp_path / "run")
    record(folder, [0])
    client = client_of(board_of(folder))
    for content in contents:
        (folder / name).write_bytes(content)
        for path in ("rows", "labels", "rollouts/0/0", "rows?filter=starred"):
            answer = client.get(f"/api/runs/run/{path}")
            assert answer.status_code == 400 and name in answer.json()["error"], content[:10]
        put = client.put("/api/runs/run/labels/0/0", json={"name": "star"}, headers=ORIGIN)
        assert put.status_code == 400 and (folder / name).read_bytes() == content, "nothing is overwritten"
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    answer = client.get("/api/runs/run/labels")
    assert answer.status_code == 400 and f"{name} is a link that leads out of" in answer.json()["error"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "query",
    [
        "SELECT getenv('HOME')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
        "SELECT list(repeat('x', 1000000)) FROM range(100000)",
        "SELECT " + "(" * 5_000 + "1" + ")" * 5_000,
        "SELECT '\x00' FROM rows; ATTACH 'x.db'",
    ],
)
def test_sql_within_its_limits(client, folder, monkeypatch, query):
    monkeypatch.setattr(sql_module, "SECONDS", 1.0)
    monkeypatch.setattr(sql_module, "MEMORY", 128 << 20)
    before = files_of(folder)
    answer = client.post("/api/runs/run/sql", json={"query": query}, headers=ORIGIN)
    assert answer.status_code == 400 and "\n" not in answer.json()["error"], answer.text[:200]
    assert files_of(folder) == before


WORDS = (
    "q", "regex", "filter", "steps", "sort", "column", "bins", "buckets", "positions", "lo", "hi", "names", "points",
    "kind", "offset", "solved", "limit", "step", "format", "starred", "runs", "after",
)  # fmt: skip
TEXT = st.text(max_size=30) | st.sampled_from([*NAMES, "-", "-reward", "reward", "0-", "9" * 40, "nan", "1e999", "٣"])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([view.split("?")[0] for view in VIEWS]),
    st.dictionaries(
        st.sampled_from(WORDS),
        TEXT | st.integers(-(2**70), 2**70).map(str) | st.floats().map(str),
        max_size=4,
    ),
)
@example("histogram", {"lo": "1e300", "hi": "1e300"})
@example("histogram", {"lo": "-1e308", "hi": "1e308"})
@example("histogram", {"lo": "5", "hi": "-5", "column": "step"})
@example("rows", {"q": "\x00", "regex": "1"})
@example("rows", {"q": " ", "filter": " "})
@example("patterns", {"q": "\x00("})
@example("series", {"names": ",,reward,", "points": "2"})
@example("export", {"format": "csv", "q": "(", "regex": "1"})
def test_no_parameters_break_a_view(client, view, parameters):
    answer = client.get(f"/api/runs/run/{view}", params=parameters)
    assert answer.status_code in (200, 400, 404, 422), answer.text
    assert answer.status_code == 200 or "\n" not in answer.json()["error"]


def test_an_index_that_is_swapped_while_it_is_read_is_a_line_or_an_answer(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(3))
    client = client_of(board_of(folder))
    assert client.get("/api/runs/run/rows?q=the").status_code == 200
    for path in list((folder / "index").iterdir()):
        if path.name != "state.json":
            path.unlink()
    answers(client)
    indexed(folder)
    assert client.get("/api/runs/run/rows").json()["total"] == 18
