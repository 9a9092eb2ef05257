"""Queries by somebody who may only read the record."""

import json
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from threading import Event, Thread, Timer, main_thread
from typing import Any
from uuid import UUID

import duckdb
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_helpers import rollouts

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder, begin_attempt, compact, write_vocabulary
from cavesson.record.read import query as record_query
from cavesson.record.read.query import query


@pytest.fixture
def run(folder: Path) -> Any:
    write_vocabulary(folder, ["a", "Ġb"], ["a", " b"])
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(4):
            rows, tokens = rollouts(2, 1, reward=[step, step + 1])
            recorder.rollouts(step, rows, tokens | {"token_id": np.array([[0], [1]])})
            recorder.metrics(step, {"kl/coef": 0.5})
    compact(folder)
    begin_attempt(folder, 3)  # step 3 is superseded, in the middle of a file
    return cavesson.open(folder)


def test_every_table_is_there(run):
    answer = query(run, "SELECT step, sum(reward) AS total FROM rows GROUP BY step ORDER BY step")
    assert answer.columns == ["step", "total"] and answer.types == ["int32", "double"]
    assert answer.rows == [(0, 1.0), (1, 3.0), (2, 5.0)] and not answer.truncated
    text = """
        SELECT t.step, v.text, s."kl/coef", r.response, u.count
        FROM tokens t JOIN vocabulary v USING (token_id) JOIN steps s USING (step) JOIN rows r USING (step, sample)
        JOIN rollups u ON u.step = t.step AND u."column" = 'reward'
        ORDER BY ALL LIMIT 2
    """
    assert query(run, text).rows == [(0, " b", 0.5, "response 1", 2), (0, "a", 0.5, "response 0", 2)]


def test_only_the_first_lines_are_returned_and_more_are_said(run):
    assert query(run, "SELECT * FROM range(3)", limit=2)[2:4] == ([(0,), (1,)], True)
    assert query(run, "SELECT * FROM range(2)", limit=2)[2:4] == ([(0,), (1,)], False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text",
    [
        "SELECT * FROM read_text('{outside}')", "SELECT * FROM read_csv('{outside}')", "SELECT * FROM '{outside}'",
        "SELECT * FROM glob('{folder}/*')", "SELECT * FROM read_text('{folder}/run.json')",
        "SELECT * FROM read_parquet('https://example.org/x.parquet')", "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{outside}''')",
        "COPY (SELECT 1) TO '{outside}'", "COPY rows TO '{outside}'", "ATTACH '{outside}'",
        "INSTALL httpfs", "LOAD httpfs",
        "SET enable_external_access = true", "CREATE TABLE x AS SELECT 1", "DROP VIEW rows", "PRAGMA database_list",
        "SELECT 1; SELECT 2", "EXPORT DATABASE '{outside}'", "CALL pragma_version()", "SELEC", "SELECT x FROM rows", "",
    ],
)  # fmt: skip
def test_what_is_no_reading_of_the_record_is_refused_in_one_line(run, tmp_path, text):
    outside = tmp_path / "outside.csv"
    outside.write_text("unseen")
    with pytest.raises(UserError) as caught:
        query(run, text.format(outside=outside, folder=run.folder.replace("'", "''")))
    assert "\n" not in str(caught.value) and "unseen" not in str(caught.value)
    assert outside.read_text() == "unseen"


@pytest.mark.parametrize("text", ["SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b"])
def test_a_query_that_takes_too_long_is_ended(run, text):
    with pytest.raises(UserError, match=r"longer than 0\.5 s"):
        query(run, text, seconds=0.5)


@pytest.mark.parametrize(
    "text", ["SELECT length(repeat('x', 1000000000))", "SELECT list(range::VARCHAR) FROM range(50000000)"]
)
def test_a_query_that_takes_too_much_memory_is_ended(run, text):
    with pytest.raises(UserError, match="128 MB"):
        query(run, text, memory=128 << 20, seconds=60)


@pytest.mark.parametrize("text", ["SELECT '\ud800'", os.fsdecode(b"SELECT '\xe9'")])
def test_a_query_that_is_no_text_is_told_so(run, text):
    with pytest.raises(UserError, match="not valid UTF-8"):
        query(run, text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("SELECT rewrd FROM rows", "line 1, column 8", 'column "rewrd" not found in FROM clause! Candidate bindings: '),
        ("SELECT step,\n  'é', rewrd\nFROM rows", "line 2, column 8", 'column "rewrd" not found'),
        ("SELECT step\nFROM nowhere", "line 2, column 6", "Table with name nowhere does not exist!"),
        ("SELECT step,,\nFROM rows", "line 1, column 13", 'syntax error at or near ","'),
        ("SELECT step\nFROM rows WHERE nothing(step)", "line 2, column 17", "nothing does not exist!"),
        ("SELECT step, reward, count(*) FROM rows GROUP BY step", "line 1, column 14", "GROUP BY"),
    ],
)
def test_what_is_wrong_with_a_query_is_told_with_its_place(run, text, place, said):
    with pytest.raises(UserError) as caught:
        query(run, text)
    assert str(caught.value).startswith(f"{place}: ") and said in str(caught.value)


@pytest.mark.parametrize("text", ["SELECT 'x'::INT", "SELECT 'x'::INT FROM rows"])
def test_an_error_in_a_value_has_no_place(run, text):
    with pytest.raises(UserError, match=r"^Conversion Error: Could not convert string 'x' to INT32"):
        query(run, text)


def test_a_query_that_nobody_wants_any_more_is_ended(run):
    cancelled = Event()
    Timer(1.0, cancelled.set).start()
    began = time.monotonic()
    with pytest.raises(UserError, match="the query was cancelled"):
        query(run, "SELECT sum(a.range * b.range) FROM range(10000000) a, range(10000000) b", cancelled=cancelled)
    assert 1.0 <= time.monotonic() - began < 5 and not record_query._running


def test_who_is_interrupted_leaves_no_query_behind(run):
    """Ctrl-C and SIGTERM raise while the answer is waited for; a query of its own process hears of neither."""
    processes = []

    def interrupt():
        while not processes:
            time.sleep(0.01)
            processes.extend(record_query._running)
        signal.pthread_kill(main_thread().ident, signal.SIGINT)

    Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        query(
            run, "SELECT count(*) FROM range(100000000) a, range(100000000) b WHERE a.range + b.range = 7", seconds=90
        )
    assert processes[0].returncode == -signal.SIGKILL and not record_query._running


def test_an_answer_that_is_too_large_is_refused(run):
    with pytest.raises(UserError, match="the answer is larger than 64 MB"):
        query(run, "SELECT repeat('x', 20000000) FROM range(5)")
    assert len(query(run, "SELECT repeat('x', 20000000) FROM range(2)").rows) == 2


def command(*words: object) -> "subprocess.CompletedProcess[str]":
    code = [sys.executable, "-m", "cavesson", *map(str, words)]
    return subprocess.run(code, capture_output=True, text=True, env=os.environ | {"COLUMNS": "100", "PATH": ""})


@pytest.mark.slow
def test_the_command_line_compacts_and_asks(folder):
    with Recorder(folder, interval=0) as recorder:
        for step in range(3):
            recorder.rollouts(step, *rollouts(1, response=["[bold]\x1b[31m"]))
        recorder.flush()
        done = command("compact", folder)
        # While a process writes the run, its newest step may still grow.
        merged, writer, said = done.stdout.splitlines()
        assert (done.returncode, merged) == (0, "2 segments merged") and "newest step is not merged" in said
        assert f"is being written by process {os.getpid()} on " in writer
    assert command("compact", folder).stdout == "2 segments merged\n"
    assert command("compact", folder).stdout == "nothing to merge\n"
    assert len(list(folder.glob("record/rows-*"))) == 1
    done = command("sql", folder, "SELECT step, response FROM rows ORDER BY step", "--limit", 2)
    assert done.returncode == 0 and "2 lines, and there are more" in done.stdout
    assert "[bold]␛[31m" in done.stdout and "\x1b" not in done.stdout
    done = command("sql", folder, "SELECT 1 FROM nowhere")
    assert done.returncode == 2 and done.stderr.startswith("cavesson: ") and "nowhere" in done.stderr
    done = command("compact", folder.parent / "no run")
    assert done.returncode == 2 and "not a run folder" in done.stderr


@pytest.mark.slow
def test_every_kind_of_value_and_any_number_of_columns_is_shown(run):
    done = command("sql", run.folder, "SELECT * FROM rows ORDER BY step, sample")
    lines = [line.split() for line in done.stdout.splitlines()]
    # 27 columns have no room beside each other on 100 characters.
    assert [line[1] for line in lines if line[:1] == ["line"]] == [str(n) for n in range(1, 7)]
    assert [float(line[1]) for line in lines if line[:1] == ["reward"]] == [0, 1, 1, 2, 2, 3]
    assert ["response", "response", "1"] in lines
    # DuckDB's own words: 'nested' is a struct with a list inside.
    values = {
        "{'nested': [1, 2]}": "nested [1, 2]", "{'text': 'x'}": "text x", "1234567.25::double": "1234567", "null": "",
        "date '2020-01-31'": "2020-01-31", "interval 3 days": "3 days", "'a'::blob": "b'a'", "true": "True",
        "map {'k': 1}": "[('k', 1)]", "'nan'::double": "nan", "2::hugeint ** 100": "1.267651e+30",
    }  # fmt: skip
    for text, expected in values.items():
        done = command("sql", run.folder, f"SELECT {text} AS x")
        assert done.returncode == 0 and expected in done.stdout, (text, done)


EXTREMES = [
    "date '5877642-06-25'", "date '0044-03-15 (BC)'", "'infinity'::date", "timestamp '294247-01-10 04:00:54'",
    "'-infinity'::timestamp", "timestamptz '2020-01-01 00:00:00+00'", "timestamp_ns '2020-01-01 00:00:00.123456789'",
    "time '24:00:00'", "timetz '12:00:00+05'", "interval '3 months 2 days'", "interval '100000000 years'",
    "170141183460469231731687303715884105727::hugeint", "340282366920938463463374607431768211455::uhugeint",
    "123456789012345678901234567890123456789012345::bignum", "'101'::bit",
    "uuid '9e6d3d6a-0911-4115-b48e-d68de88f96e6'",
    "'a'::enum('a', 'b')", "union_value(k := date '5877642-06-25')", "'x'::variant", "'POINT(1 1)'::geometry",
    "'99999999999999999999999999999999999999'::decimal(38, 0)", "1.5::decimal(38, 10)", "9223372036854775807",
    "18446744073709551615::ubigint", "'nan'::double", "'-inf'::float", "1e-320", "chr(0)", "''", "'\\xff'::blob",
    "null",
    "'{\"a\": 1}'::json", "[1, 2]::int[2]", "[[]]", "true",
]  # fmt: skip
NESTED = ["{}", "[{}, null]", "{{'a': {}}}", "map {{1: {}}}", "[[[[[[[[[[{}]]]]]]]]]]", "[{}][1:0]"]
EXACT = (bool, int, float, str, bytes, type(None), Decimal, UUID, list, dict)


def only_exact(value: Any) -> bool:
    """Whether a value and all in it is of a type that neither lacks values of DuckDB's nor changes them."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else []
    return isinstance(value, (*EXACT, tuple)) and all(map(only_exact, parts))


def test_values_that_python_does_not_have_are_texts(run):
    texts = [form.format(value) for form in NESTED for value in EXTREMES]
    answer = query(run, f"SELECT {', '.join(texts)}", seconds=60)
    own = duckdb.connect()
    for text, value in zip(texts, answer.rows[0], strict=True):
        expected, kind = own.sql(f"SELECT CAST({text} AS VARCHAR), typeof({text})").fetchall()[0]
        assert only_exact(value), (text, value)
        if isinstance(value, str | int | Decimal | UUID) and not isinstance(value, bool):
            assert str(value) == expected, (text, kind)
        elif value is None:
            assert expected is None, text
    assert answer.rows[0][:12] == (
        "5877642-06-25", "0044-03-15 (BC)", "infinity", "294247-01-10 04:00:54", "-infinity", "2020-01-01 00:00:00+00",
        "2020-01-01 00:00:00.123456789", "24:00:00", "12:00:00+05", "3 months 2 days", "100000000 years", 2**127 - 1,
    )  # fmt: skip
    assert answer.rows[0][12] == 2**128 - 1
    assert answer.types[:2] == ["date", "date"] and answer.types[11:13] == ["hugeint", "uhugeint"]


@pytest.mark.slow
@settings(deadline=None, max_examples=5, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(-(2**31) + 2, 2**31 - 2), min_size=20, max_size=40), st.integers(-(2**62), 2**62))
def test_every_date_and_time_is_told_as_duckdb_tells_it(run, days, microseconds):
    dates = [f"date '1970-01-01' + {day}::int" for day in days if -2_400_000 < day < 2**30]
    times = [f"make_timestamp({microseconds // n})" for n in (1, 7, 2**20)]
    texts = [f"try({text})" for text in dates + times]
    answer = query(run, f"SELECT {', '.join(texts)}")
    assert answer.rows == duckdb.sql("SELECT " + ", ".join(f"CAST({text} AS VARCHAR)" for text in texts)).fetchall()


def test_columns_of_one_name_and_odd_names_are_kept(run):
    answer = query(run, """SELECT 1 AS a, date '2020-01-01' AS a, 2 AS "x""y", 3 AS "#1", sum(step) FROM rows -- x""")
    assert answer.columns == ["a", "a", 'x"y', "#1", "sum(step)"] and answer.rows == [(1, "2020-01-01", 2, 3, 6)]


def test_the_record_is_not_changed_by_questions(run):
    before = {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()}
    query(run, "SELECT count(*) FROM rows, tokens, steps, rollups, vocabulary")
    assert {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()} == before
    assert json.loads((Path(run.folder) / "run.json").read_text())["algorithm"] == "ppo"
