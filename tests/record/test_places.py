"""Runs that are somewhere else, broken or empty."""

import io
import json
from pathlib import Path

import pytest
from record_helpers import rollouts
from rich.console import Console

import cavesson
from cavesson.errors import UserError
from cavesson.exporters import EXPORTERS
from cavesson.record import Recorder, write_run, write_vocabulary
from cavesson.record.read.show import headline, show
from cavesson.record.storage import Location, Remote


@pytest.fixture
def place(tmp_path) -> Remote:
    """A small run at a URL; users can give those of object stores only."""
    write_vocabulary(tmp_path / "run", ["a"], ["a"])
    with Recorder(tmp_path / "run") as recorder:
        rows, tokens = rollouts(2, 1)
        recorder.rollouts(0, rows, {"mask": tokens["mask"], "token_id": tokens["mask"] * 0})
        recorder.metrics(0, {"reward/mean": 0.5})
    return Remote(f"file://{tmp_path}/run")


def shown(place: Location) -> str:
    console = Console(file=io.StringIO(), width=120)
    show(place, console)
    return console.file.getvalue()


def test_a_run_at_a_url_is_shown_and_exported_as_one_in_a_folder(place, tmp_path):
    folder = tmp_path / "run"
    assert shown(place) == shown(folder) and "response 1" in shown(place)
    assert headline(place) == "mean reward of a step 0.5"
    assert EXPORTERS["rl-logging-board"](place, tmp_path / "out", False) == 2
    lines = [json.loads(line) for line in (tmp_path / "out" / "rank-0000.jsonl").read_text().splitlines()]
    assert [(line["response"], line["response_tokens"]) for line in lines] == [
        ("response 0", ["a"]),
        ("response 1", ["a"]),
    ]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("break_", "message"),
    [
        (lambda run: (run / "run.json").unlink(), "is not a run folder: it has no run.json"),
        (lambda run: (run / "run.json").write_text("{"), "run.json is not JSON: "),
        (lambda run: (run / "run.json").write_text("[]"), "run.json is not a JSON object"),
        (lambda run: (run / "run.json").write_text("[" * 100_000), "run.json is not JSON: "),
        (
            lambda run: truncate(*run.glob("record/rows-*")),
            "rows-00000000-0000-0000.parquet is not a complete Parquet file",
        ),
        (
            lambda run: truncate(*run.glob("record/steps-*")),
            "steps-00000000-0000-0000.parquet is not a complete Parquet",
        ),
        (lambda run: truncate(*run.glob("vocabulary.parquet")), "vocabulary.parquet is not a complete Parquet file"),
        (
            lambda run: (run / "attempts" / "0000.json").write_text("{"),
            r"0000\.json does not say where an attempt starts: ",
        ),
    ],
)
def test_a_broken_run_is_one_plain_line(place, tmp_path, break_, message):
    run = tmp_path / "run"
    break_(run)
    for where in (run, place):
        with pytest.raises(UserError, match=message) as failure:
            shown(where)
            EXPORTERS["rl-logging-board"](where, tmp_path / "out", False)
        assert "\n" not in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_record_is_shown_as_such_and_exported_as_nothing(tmp_path):
    write_run(tmp_path / "run", {"algorithm": "ppo"})
    assert "none recorded yet" in shown(tmp_path / "run")
    assert EXPORTERS["rl-logging-board"](tmp_path / "run", tmp_path / "out") == 0
    with pytest.raises(UserError, match="is not a run folder"):
        cavesson.open(tmp_path / "nothing")


def test_tables_are_the_same_in_pandas_and_polars(place):
    pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    run = cavesson.open(place)
    for name in ("rows", "tokens", "steps", "rollups"):
        table = run.arrow(name)
        assert run.pandas(name).columns.tolist() == run.polars(name).columns == table.column_names
        assert len(run.pandas(name)) == len(run.polars(name)) == table.num_rows > 0
    assert run.pandas("rows", ["step", "reward"])["reward"].tolist() == [0.0, 1.0]
    assert run.polars("tokens", ["sample", "learned"], [0]).rows() == [(0, True), (1, True)]
    assert run.polars("rows")["reward_parts"].dtype == polars.List(
        polars.Struct({"key": polars.String, "value": polars.Float64})
    )
