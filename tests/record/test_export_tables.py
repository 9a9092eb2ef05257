"""CSV, JSON lines and Parquet hold every value of the record, as other readers read them."""

import csv
import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compaction_helpers import record
from record_helpers import rollouts

import cavesson
from cavesson.cli import main
from cavesson.errors import UserError
from cavesson.exporters import EXPORTERS, portions, tables
from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary
from cavesson.record.maintain.compaction import compact
from cavesson.record.storage import Folder

TEXTS = ['=HYPERLINK("http://x")', "", 'a "quoted", cell', "two\r\nlines\n", "\ttab", "+1", "名前 🤖", "NULL"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts and numbers that tables get wrong, in two steps by two processes; a value that was not measured."""
    folder = tmp_path_factory.mktemp("tables") / "run"
    write_run(folder, {"algorithm": "ppo"})
    write_vocabulary(folder, ["a", "=b", ""], ["a", "=b", ""])
    attempt = begin_attempt(folder, 0)
    generator = np.random.default_rng(0)
    for rank in (0, 1):
        with Recorder(folder, rank=rank, attempt=attempt) as recorder:
            for step in (0, 3):
                rows, tokens = rollouts(8, 3)
                rows |= {
                    "response": TEXTS, "sample": np.arange(8) + 8 * rank, "extra": ['{"k": [1, "="]}', *[None] * 7],
                    "reward": np.array([0.1, 1 / 3, math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308]),
                }  # fmt: skip
                tokens["logprob"] = generator.normal(size=(8, 3)).astype(np.float32)
                recorder.rollouts(step, rows, tokens)
                if rank == 0:
                    recorder.metrics(step, {"loss": 0.1 + step})
    return folder


def same(first: float | None, second: float | None) -> bool:
    return first is second or str(first) == str(second)


def test_parquet_is_the_record(run: Path, tmp_path: Path) -> None:
    assert EXPORTERS["parquet"](run, tmp_path / "out") == 32
    opened = cavesson.open(run)
    for name in ("rows", "tokens", "steps"):
        written, recorded = pq.read_table(tmp_path / "out" / f"{name}.parquet"), opened.arrow(name)
        assert written.schema.names == recorded.schema.names
        assert str(written.to_pylist()) == str(recorded.to_pylist())
    assert pq.read_table(tmp_path / "out" / "vocabulary.parquet").to_pylist() == opened.vocabulary.to_pylist()


def test_json_lines_are_the_record_without_what_was_not_measured(run: Path, tmp_path: Path) -> None:
    EXPORTERS["jsonl"](run, tmp_path / "out")
    for name in ("rows", "tokens"):
        lines = (tmp_path / "out" / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        recorded = cavesson.open(run).arrow(name).to_pylist(maps_as_pydicts="strict")
        assert len(lines) == len(recorded)
        for line, row in zip(lines, recorded, strict=True):
            assert str(json.loads(line)) == str({key: value for key, value in row.items() if value is not None})


def test_csv_read_by_pythons_own_reader_is_the_record(run: Path, tmp_path: Path) -> None:
    EXPORTERS["csv"](run, tmp_path / "out")
    for name in ("rows", "tokens"):
        with (tmp_path / "out" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
        for line, row in zip(lines, cavesson.open(run).arrow(name).to_pylist(maps_as_pydicts="strict"), strict=True):
            for column, value in row.items():
                if isinstance(value, float):
                    kind = np.float32 if name == "tokens" else np.float64
                    assert same(float(kind(line[column])), value), (column, value)
                elif isinstance(value, dict | list):
                    assert json.loads(line[column]) == value
                else:
                    assert line[column] == (
                        "" if value is None else str(value).lower() if value is True else str(value)
                    )


def test_csv_tells_an_empty_text_from_one_that_is_not_there(run: Path, tmp_path: Path) -> None:
    """As DuckDB and pandas read it, which know the difference."""
    EXPORTERS["csv"](run, tmp_path / "out")
    file = tmp_path / "out" / "rows.csv"
    options = "all_varchar = true, allow_quoted_nulls = false"
    query = f"select count(*) filter (response = ''), count(ground_truth) from read_csv(?, {options})"
    assert duckdb.connect().execute(query, [str(file)]).fetchone() == (4, 0)
    raw = file.read_text(encoding="utf-8")
    assert ',"",' in raw and ",," in raw


def test_formulas_are_quoted_only_where_that_is_asked_for(run: Path, tmp_path: Path) -> None:
    tables.export(run, tmp_path / "quoted", format="csv", quote_formulas=True)
    EXPORTERS["csv"](run, tmp_path / "exact")
    quoted, exact = (
        pandas.read_csv(tmp_path / name / "rows.csv", keep_default_na=False) for name in ("quoted", "exact")
    )
    assert exact["response"][:8].str.replace("\r\n", "\n").tolist() == [text.replace("\r\n", "\n") for text in TEXTS]
    for before, after in zip(exact["response"], quoted["response"], strict=True):
        begins = before.lstrip(" '\"")[:1] in ("=", "+", "-", "@") or before[:1] in ("\t", "\r", "\n")
        assert after == (f"'{before}" if before and begins else before)
    assert float(exact["reward"][4]) == float(quoted["reward"][4]) == -math.inf  # a number is not a formula


def test_only_a_portion_is_read_at_a_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    arrow = cavesson.Run.arrow

    def counted(self: cavesson.Run, *arguments: object, **names: object) -> pa.Table:
        sizes.append((table := arrow(self, *arguments, **names)).num_rows)  # type: ignore[arg-type]
        return table

    monkeypatch.setattr(portions, "AT_ONCE", 4)
    monkeypatch.setattr(cavesson.Run, "arrow", counted)
    assert EXPORTERS["parquet"](run, tmp_path / "out") == 32
    assert sizes == [16, 16, 48, 48]


def test_a_merged_record_comes_out_the_same(run: Path, tmp_path: Path) -> None:
    EXPORTERS["csv"](run, tmp_path / "before")
    compact(cavesson.open(run).storage, ended=True)
    EXPORTERS["csv"](run, tmp_path / "after")
    for name in ("rows.csv", "tokens.csv", "steps.csv", "vocabulary.csv"):
        assert (tmp_path / "before" / name).read_bytes() == (tmp_path / "after" / name).read_bytes()


def in_training(folder: Path, steps: int) -> Path:
    live = folder / "live"
    write_run(live, {"algorithm": "ppo"})
    write_vocabulary(live, [*"abcdefghijkl"], [*"abcdefghijkl"])
    begin_attempt(live, 0)
    record(live, range(steps))
    return live


@pytest.mark.parametrize("opened", [1, 3, 8])
@pytest.mark.parametrize("format", ["rl-logging-board", "jsonl"])
def test_a_merge_meanwhile_changes_nothing(
    format: str, opened: int, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge removes the files when the export has found them and opens one, the first or a later one."""
    live, seen = in_training(tmp_path, 6), 0
    EXPORTERS[format](live, tmp_path / "before")
    parquet = Folder.parquet

    def merging(self: Folder, *arguments: Any) -> pq.ParquetFile:
        nonlocal seen
        seen += 1
        if seen == opened:
            assert compact(live, ended=True)
        return parquet(self, *arguments)

    monkeypatch.setattr(Folder, "parquet", merging)
    EXPORTERS[format](live, tmp_path / "after")
    assert seen > opened
    for file in (tmp_path / "before").iterdir():
        assert (tmp_path / "after" / file.name).read_bytes() == file.read_bytes()


def test_what_is_recorded_meanwhile_is_in_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, arrow, later = in_training(tmp_path, 2), cavesson.Run.arrow, iter([range(2, 3)])

    def growing(self: cavesson.Run, *arguments: Any, **names: Any) -> pa.Table:
        for steps in later:
            record(live, steps)
        return arrow(self, *arguments, **names)

    monkeypatch.setattr(cavesson.Run, "arrow", growing)
    EXPORTERS["parquet"](live, tmp_path / "out")
    for name in ("rows", "tokens", "steps"):
        assert set(pq.read_table(tmp_path / "out" / f"{name}.parquet")["step"].to_pylist()) == {0, 1}


def test_nothing_is_overwritten(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for format in ("csv", "jsonl", "parquet"):
        with pytest.raises(UserError, match="exists"):
            EXPORTERS[format](run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def sql(run: Path, query: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cavesson", "sql", run, query, *flags], capture_output=True, text=True, encoding="utf-8"
    )


@pytest.mark.slow
def test_sql_prints_csv_and_json_for_programs(run: Path) -> None:
    query = "select sample, response, reward, null as nothing, [1, 2] as list from rows where step = 3 order by sample"
    expected = cavesson.open(run).sql(query).fetchall()
    found = list(csv.reader(io.StringIO(sql(run, query, "--csv").stdout)))
    assert found[0] == ["sample", "response", "reward", "nothing", "list"]
    for line, (sample, response, reward, *_) in zip(found[1:], expected, strict=True):
        assert (int(line[0]), line[1].replace("\r\n", "\n")) == (sample, response.replace("\r\n", "\n"))
        assert same(float(line[2]), reward) and line[3:] == ["", "[1, 2]"]
    objects = json.loads(sql(run, query, "--json").stdout)
    assert str([tuple(one.values()) for one in objects]) == str(expected)


@pytest.mark.slow
def test_sql_prints_the_parts_of_a_reward_as_an_export_does(tmp_path: Path) -> None:
    parts = [{"correct": 1.0, "short": 0.5}, None]
    with Recorder(tmp_path / "run") as recorder:
        rows = {"prompt": ["p"] * 2, "response": ["r"] * 2, "reward": [1.0] * 2, "reward_parts": parts}
        recorder.rollouts(0, rows)
    query = "select reward_parts, map{1: 'a'} as numbered from rows order by sample"
    objects = json.loads(sql(tmp_path / "run", query, "--json").stdout)
    assert objects == [{"reward_parts": part, "numbered": [[1, "a"]]} for part in parts]
    lines = list(csv.reader(io.StringIO(sql(tmp_path / "run", query, "--csv").stdout)))
    assert [line[0] and json.loads(line[0]) for line in lines[1:]] == [parts[0], ""]


@pytest.mark.slow
def test_sql_for_programs_prints_all_lines_or_says_that_it_does_not(run: Path) -> None:
    query = "select i from range(5000) t(i), (select 1 from rows limit 1)"
    done = sql(run, query, "--csv")
    assert len(done.stdout.splitlines()) == 5001 and done.stderr == ""
    done = sql(run, query, "--csv", "--limit", "2")
    assert len(done.stdout.splitlines()) == 3 and "first 2 lines" in done.stderr
    done = sql(run, "select 1 as a, 2 as a", "--json")
    assert done.returncode == 2 and "'a'" in done.stderr


def test_the_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["cavesson", "export", str(run), str(tmp_path / "out"), "--format", "parquet", "--quote-formulas"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "--format csv" in capsys.readouterr().err
