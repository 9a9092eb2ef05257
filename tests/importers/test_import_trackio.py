"""Databases of trackio: tables of completions, traces and metrics of their runs."""

import json
import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_helpers import rows

import cavesson
from cavesson.errors import UserError
from cavesson.importers import follow_run, import_run
from cavesson.importers.databases import database_rows, inside, places_in, within

METRICS = "CREATE TABLE metrics (id INTEGER PRIMARY KEY, run_id TEXT, run_name TEXT, step INTEGER, metrics TEXT)"
TRACES = (
    "CREATE TABLE traces (id TEXT PRIMARY KEY, run_id TEXT, run_name TEXT, step INTEGER, key TEXT, "
    "trace_index INTEGER, messages TEXT, metadata TEXT, search_text TEXT, spans TEXT NOT NULL DEFAULT '[]')"
)


def database(
    path: Path, logs: dict[str, list[dict]], traces: dict[str, list[dict]] | None = None, wal: bool = False
) -> Path:
    """A database as trackio 0.43 makes it, with the calls of ``log`` of each run; JSON is stored as bytes."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"PRAGMA journal_mode = {'WAL' if wal else 'DELETE'}")
        connection.execute(METRICS)
        for run, calls in logs.items():
            for step, call in enumerate(calls):
                values = (run, run, step, json.dumps(call).encode())
                connection.execute("INSERT INTO metrics (run_id, run_name, step, metrics) VALUES (?, ?, ?, ?)", values)
        if traces is None:
            return path
        connection.execute(TRACES)
        for run, some in traces.items():
            for number, trace in enumerate(some):
                texts = [json.dumps(trace[name]).encode() for name in ("messages", "metadata")]
                values = (f"{run}:{number}", run, run, trace["step"], trace["key"], number, *texts, "")
                connection.execute(f"INSERT INTO traces VALUES ({', '.join('?' * 9)}, '[]')", values)
    return path


def completions(step: int) -> dict[str, Any]:
    """What TRL logs: one answer was judged by one reward function, the other by both."""
    rewards = [(1.0, 0.5), (0.0, "NaN")]
    row = {"step": step, "prompt": "Q", "advantage": 0.5}
    table = [row | {"completion": f"A{i}", "maths": a, "format": b} for i, (a, b) in enumerate(rewards)]
    return {"completions": {"_type": "trackio.table", "_value": table}}


def trace(reward: Any, **metadata: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    return {"step": 3, "key": "rollouts/train", "messages": messages, "metadata": {"reward": reward} | metadata}


@pytest.mark.parametrize("wal", [False, True])
def test_tables_of_completions_are_those_of_trl(tmp_path, wal):
    logs = [
        completions(5) | {"loss": 0.25, "train/global_step": 5},
        {"loss": 0.5, "train/global_step": 6},
        completions(10),
    ]
    file = database(tmp_path / "maths.db", {"first": logs}, wal=wal)
    beside = sorted(tmp_path.iterdir())
    for source in (file, file / "first", file / "first" / "completions"):
        run = tmp_path / "runs" / source.name
        report = import_run(source, run, metrics=file)
        assert (report.format, report.rollouts, report.rejected) == ("trl", 4, 0)
        judged = [(step, "Q", *one) for step in (5, 10) for one in (("A0", 1.5, {"maths": 1.0, "format": 0.5}),)]
        found = rows(run, "step", "prompt", "response", "reward", "reward_parts")
        assert found[::2] == judged
        assert [line[3] for line in found[1::2]] == [0.0, 0.0] and math.isnan(found[1][4]["format"])
        logged = cavesson.open(run).arrow("steps").to_pylist()
        assert [(line["step"], line["loss"]) for line in logged] == [(5, 0.25), (6, 0.5)]
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == beside, "nothing is written beside it"


def test_traces_are_conversations_with_their_rewards(tmp_path):
    given = [trace(1, scores={"right": 1, "short": 0.5}, ground_truth="42"), trace(None)]
    database(tmp_path / "agent.db", {"a": [{"loss": 1.0}]}, {"a": given})
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("trackio", 2, 0)
    columns = ("step", "prompt", "reward", "reward_parts", "ground_truth", "turns", "calls")
    assert rows(tmp_path / "run", *columns) == [
        (3, "[system]\nS\n\n[user]\nQ", 1.0, {"right": 1.0, "short": 0.5}, "42", 2, 1),
        (3, "[system]\nS\n\n[user]\nQ", None, None, None, 2, 1),
    ]
    turns = cavesson.open(tmp_path / "run").arrow("turns").to_pylist()
    assert [(turn["role"], turn["name"], turn["text"]) for turn in turns[1:3]] == [
        ("tool", "multiply", "42"),
        ("assistant", None, "It is 42."),
    ]
    assert json.loads(rows(tmp_path / "run", "extra")[0][0])["metadata"] == given[0]["metadata"]


def test_one_of_several_runs_is_imported(tmp_path):
    file = database(tmp_path / "p.db", {"team/a b": [completions(1) | {"loss": 1.0}], ".b%": [completions(2)]})
    with pytest.raises(UserError, match=r"rollouts of 2 runs.*import one of them: %2Eb%25, team%2Fa b$"):
        import_run(file, tmp_path / "run")
    for name, step in (("team%2Fa b", 1), ("%2Eb%25", 2)):
        import_run(file / name, tmp_path / f"run{step}")
        assert {line[0] for line in rows(tmp_path / f"run{step}", "step")} == {step}
    with pytest.raises(UserError, match=r"has no run 'c': it has team/a b, \.b%"):
        import_run(file / "c", tmp_path / "run")
    with pytest.raises(UserError, match=r"has the metrics of 2 runs.*; name one, such as .*p\.db/team%2Fa b$"):
        import_run(file / "%2Eb%25", tmp_path / "run", metrics=file)
    with pytest.raises(UserError, match="import it without --follow"):
        follow_run(file / "%2Eb%25", tmp_path / "followed", until_idle=0.1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no such table: metrics"),
        (b"SQLite format 3\0" + b"x" * 100, "it cannot be read as a database of trackio"),
        (b"text", "it cannot be read as a database of trackio: file is not a database"),
    ],
)
def test_what_is_no_database_of_trackio_is_said_in_a_line(tmp_path, content, said):
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "p.db"
    file.write_bytes(content)
    for source in (file, file.parent, file / "run"):
        with pytest.raises(UserError, match=said) as raised:
            import_run(source, tmp_path / "run")
        assert "\n" not in str(raised.value).removeprefix(str(raised.value).partition("\n")[0] + "\n")
    with pytest.raises(UserError, match="cannot be read as a database of trackio"):
        import_run(file, tmp_path / "run", metrics=file)


def test_a_database_with_metrics_alone_says_what_reads_them(tmp_path):
    file = database(tmp_path / "p.db", {"a": [{"loss": 1.0}]}, {})
    with pytest.raises(UserError, match="no tables and no traces; its metrics are read with --metrics"):
        import_run(file, tmp_path / "run")


def test_any_other_table_is_mapped(tmp_path):
    table = {"_type": "trackio.table", "_value": [{"question": "Q", "answer": "A", "score": 0.5, "split": "eval"}]}
    file = database(tmp_path / "p.db", {"a": [{"loss": 1.0}, {"samples": table}]})
    columns = {"prompt": "question", "response": "answer", "reward": "score"}
    assert import_run(file, tmp_path / "run", columns=columns).format == "plain"
    assert rows(tmp_path / "run", "step", "split", "prompt", "response", "reward") == [(1, "eval", "Q", "A", 0.5)]


def test_a_line_that_is_not_json_is_said(tmp_path):
    file = database(tmp_path / "p.db", {"a": [{"loss": 1.0}]})
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute('UPDATE metrics SET metrics = \'{"a": {"_type": "trackio.table"\'')
    with pytest.raises(
        UserError, match=r"p\.db has no rollouts: it cannot be read as a database of trackio: Expecting"
    ):
        import_run(file, tmp_path / "run")


def test_a_database_that_was_cut_loses_no_words_over_it(tmp_path):
    whole = database(tmp_path / "p.db", {"a": [completions(step) for step in range(200)]}).read_bytes()
    for size in range(0, len(whole), 4096):
        (tmp_path / "cut.db").write_bytes(whole[:size])
        try:
            import_run(tmp_path / "cut.db", tmp_path / f"run{size}")
        except UserError as error:
            assert "cut.db" in str(error) and "\n" not in str(error)


@given(st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True))
def test_every_name_of_a_run_and_key_has_a_place(tmp_path_factory, names):
    names = [name for name in names if name.encode("utf-8", "ignore").decode() == name and "\0" not in name]
    file = tmp_path_factory.mktemp("d") / "p.db"
    table = {"_type": "trackio.table", "_value": [{"a": 1}]}
    database(file, {name: [{key: table} for key in names] for name in names})
    for run in names:
        for key in names:
            place = within(file, run, key)
            found = inside(place)
            assert found is not None and (found.file, found.run, found.key) == (file, run, key)
            assert places_in(place) == [place] and len([*database_rows(place)]) == 1
