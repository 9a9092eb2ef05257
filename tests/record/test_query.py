"""Queries by somebody who may only read the record."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_helpers import rollouts

import dressage
from dressage.errors import UserError
from dressage.record import Recorder, begin_attempt, compact, write_vocabulary
from dressage.record.query import query


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
    return dressage.open(folder)


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


def test_an_answer_that_is_too_large_is_refused(run):
    with pytest.raises(UserError, match="the answer is larger than 64 MB"):
        query(run, "SELECT repeat('x', 20000000) FROM range(5)")
    assert len(query(run, "SELECT repeat('x', 20000000) FROM range(2)").rows) == 2


def command(*words: object) -> "subprocess.CompletedProcess[str]":
    code = [sys.executable, "-m", "dressage", *map(str, words)]
    return subprocess.run(code, capture_output=True, text=True, env={"COLUMNS": "100", "PATH": ""})


def test_the_command_line_compacts_and_asks(folder):
    with Recorder(folder) as recorder:
        for step in range(3):
            recorder.rollouts(step, *rollouts(1, response=["[bold]\x1b[31m"]))
    done = command("compact", folder)
    # Of what was just written, the newest step may still grow.
    merged, said = done.stdout.splitlines()
    assert (done.returncode, merged) == (0, "2 segments merged") and "within the last hour" in said
    for path in folder.glob("record/*"):
        os.utime(path, (0, 0))
    assert command("compact", folder).stdout == "2 segments merged\n"
    assert command("compact", folder).stdout == "there was nothing to merge\n"
    assert len(list(folder.glob("record/rows-*"))) == 1
    done = command("sql", folder, "SELECT step, response FROM rows ORDER BY step", "--limit", 2)
    assert done.returncode == 0 and "2 lines, of more" in done.stdout
    assert "[bold]␛[31m" in done.stdout and "\x1b" not in done.stdout
    done = command("sql", folder, "SELECT 1 FROM nowhere")
    assert done.returncode == 2 and done.stderr.startswith("dressage: ") and "nowhere" in done.stderr
    done = command("compact", folder.parent / "no run")
    assert done.returncode == 2 and "no run folder" in done.stderr


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
        "date '2020-01-31'": "2020-01-31", "interval 3 days": "days=3", "'a'::blob": "b'a'", "true": "True",
        "map {'k': 1}": "[('k', 1)]", "'nan'::double": "nan", "2::hugeint ** 100": "1.267651e+30",
    }  # fmt: skip
    for text, expected in values.items():
        done = command("sql", run.folder, f"SELECT {text} AS x")
        assert done.returncode == 0 and expected in done.stdout, (text, done)


def test_the_record_is_not_changed_by_questions(run):
    before = {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()}
    query(run, "SELECT count(*) FROM rows, tokens, steps, rollups, vocabulary")
    assert {path: path.read_bytes() for path in Path(run.folder).rglob("*") if path.is_file()} == before
    assert json.loads((Path(run.folder) / "run.json").read_text())["algorithm"] == "ppo"
