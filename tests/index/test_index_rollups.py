"""Roll-ups and metrics in the index against those of the record itself, whatever the run does meanwhile."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from index_helpers import indexed, new_run, record, rows_of, tokens_of

import cavesson.record
from cavesson.index import metrics as metrics_module
from cavesson.index import rollups as rollups_module
from cavesson.index.build import Builder
from cavesson.index.folder import metrics_name
from cavesson.index.rollups import BINS, rollups
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.record import Recorder, begin_attempt

LEVELS = {"row": ("sketch_keys", "sketch_counts"), "token": ("bin_counts", "bin_sums")}
NUMBERS = ("count", "sum", "sum_squares", "min", "max")


def of_the_index(shot: Snapshot, level: str, column: str) -> dict:
    """By step and split: the numbers and the bins of every line that counts."""
    found = rollups(shot, level, column)
    splits = shot.state.codes.get("split", [])
    lines, of = {}, found.of_bins(np.arange(len(found.lines)))
    for i, line in enumerate(found.lines):
        split = None if line["split"] == 255 else splits[line["split"]]
        bins = [found.bins[name][of == i].tolist() for name in LEVELS[level]]
        key = (int(line["step"]), split)
        assert key not in lines, "a step counts once"
        lines[key] = ([float(line[name]) for name in NUMBERS], bins)
    return lines


def of_the_record(folder, level: str, column: str) -> dict:
    found = cavesson.record.open(folder).rollups([column]).to_pylist()
    return {
        (line["step"], line["split"]): (
            [math.nan if line[name] is None else float(line[name]) for name in NUMBERS],
            [line[name] for name in LEVELS[level]],
        )
        for line in found
        if line["level"] == level
    }


def check(folder, shot: Snapshot, columns=(("row", "reward"), ("row", "part/good"), ("token", "kl_k1"))) -> int:
    lines = 0
    for level, column in columns:
        got, wanted = of_the_index(shot, level, column), of_the_record(folder, level, column)
        assert sorted(got, key=repr) == sorted(wanted, key=repr), (level, column)
        for key, (numbers, bins) in wanted.items():
            np.testing.assert_array_equal(got[key][0], numbers, err_msg=f"{column} {key}")
            assert got[key][1] == bins, (column, key)
        lines += len(wanted)
    return lines


@pytest.fixture
def folder(tmp_path):
    return new_run(tmp_path / "run")


def test_every_line_of_the_record_is_in_the_index(folder):
    record(folder, range(5), split=["train"] * 4 + ["eval"] * 2)
    shot = indexed(folder)
    table = cavesson.record.open(folder).rollups()
    columns = set(zip(table["level"].to_pylist(), table["column"].to_pylist(), strict=True))
    assert check(folder, shot, sorted(columns)) == table.num_rows > 50
    assert len(rollups(shot, "row", "nothing").lines) == len(rollups(shot, "token", "reward").lines) == 0


def test_a_roll_up_is_what_the_rollouts_say(folder):
    record(folder, range(3))
    found = rollups(indexed(folder), "row", "reward")
    for line in found.lines:
        rewards = rows_of(int(line["step"]), 6)["reward"]
        assert line["count"] == 6 and line["sum"] == pytest.approx(rewards.sum())
        assert (line["min"], line["max"]) == (rewards.min(), rewards.max())
        assert line["sum_squares"] == pytest.approx((rewards**2).sum())


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=5),
    st.booleans(),
    st.integers(1, 3),
)
def test_whatever_a_run_does_the_index_has_its_roll_ups(tmp_path_factory, attempts, compacted, at_once):
    """Attempts that each start somewhere, two ranks now and then, indexed after some of them."""
    before, rollups_module.STEPS_AT_ONCE = rollups_module.STEPS_AT_ONCE, at_once
    try:
        folder = new_run(tmp_path_factory.mktemp("run") / "run")
        for start, count, other_rank in attempts:
            attempt = begin_attempt(folder, start)
            record(folder, range(start, start + count), batch=2, attempt=attempt)
            if other_rank:
                indexed(folder)
                with Recorder(folder, attempt=attempt, rank=1) as recorder:
                    rows = rows_of(start, 3) | {"sample": np.arange(7, 10), "split": ["eval", "train", "eval"]}
                    recorder.rollouts(start, rows, tokens_of(start, 3))
        if compacted:
            cavesson.record.compact(folder)
        assert check(folder, indexed(folder)) > 0
    finally:
        rollups_module.STEPS_AT_ONCE = before


def test_a_snapshot_keeps_its_roll_ups_while_the_run_starts_again_at_an_earlier_step(folder):
    record(folder, range(6))
    before = indexed(folder)
    wanted = of_the_record(folder, "row", "reward")
    assert of_the_index(before, "row", "reward") == wanted
    record(folder, [6], attempt=0)
    assert len(of_the_index(indexed(folder), "row", "reward")) == 7
    record(folder, range(2, 4), batch=4)
    after = indexed(folder)
    check(folder, after)
    assert sorted(step for step, _ in of_the_index(after, "row", "reward")) == [0, 1, 2, 3]
    assert of_the_index(before, "row", "reward") == wanted, "lines are only ever added"


def test_a_step_that_grows_is_counted_as_a_whole(folder):
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for i in range(3):
            rows = rows_of(i, 2) | {"sample": [10 * i, 10 * i + 1]}
            recorder.rollouts(7, rows, tokens_of(i, 2))
            recorder.flush()
            (line,) = rollups(indexed(folder), "row", "reward").lines
            assert line["count"] == 2 * (i + 1)
    check(folder, snapshot(folder / "index"))


def test_files_only_grow_by_what_changed(folder):
    record(folder, range(20))
    first = indexed(folder).state.rollups
    record(folder, [20], attempt=0)
    second = indexed(folder).state.rollups
    columns = cavesson.record.open(folder).rollups(steps=[20]).to_pydict()["level"]
    # A line that says from which step on the others no longer count, and one for each column.
    assert second["row"][0] - first["row"][0] == 1 + columns.count("row")
    assert second["token"][0] - first["token"][0] == 1 + columns.count("token")
    for level in BINS:
        assert (folder / "index" / f"rollups-{level}").stat().st_size == second[level][0] * rollups_module.LINE.itemsize


def test_metrics_are_those_of_the_record(folder):
    record(folder, range(4))
    shot = indexed(folder)
    assert shot.metrics.equals(cavesson.record.open(folder).steps().combine_chunks())
    number = shot.state.metrics
    assert indexed(folder).state.metrics == number, "they are not written again while nothing comes"


def test_metrics_follow_a_run_and_an_older_snapshot_stays_as_it_was(folder, monkeypatch):
    monkeypatch.setattr(metrics_module, "GROWING", 2)
    attempt = begin_attempt(folder, 0)
    record(folder, [0], attempt=attempt)
    before = indexed(folder)
    seen = before.metrics
    for step in range(1, 6):
        record(folder, [step], attempt=attempt)
        shot = indexed(folder)
        assert shot.metrics["step"].to_pylist() == list(range(step + 1))
        assert shot.metrics["loss"].to_pylist() == [1 / (s + 1) for s in range(step + 1)]
    assert seen["step"].to_pylist() == [0]
    files = sorted(path.name for path in (folder / "index").glob("metrics-*"))
    assert len(files) == 2 and metrics_name(shot.state.metrics) in files
    record(folder, [2], attempt=begin_attempt(folder, 2))
    assert indexed(folder).metrics["step"].to_pylist() == [0, 1, 2]


def test_a_metric_that_comes_later_has_no_number_before(folder):
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.metrics(0, {"a": 1.0})
        recorder.metrics(1, {"b": math.nan, "../../c": 2.0})
    table = indexed(folder).metrics.to_pydict()
    assert table["a"] == [1.0, None] and table["../../c"] == [None, 2.0]
    assert table["b"][0] is None and table["b"][1] != table["b"][1]


def test_an_update_that_is_broken_off_leaves_the_lines_that_count(folder, monkeypatch):
    record(folder, range(3))
    indexed(folder)
    record(folder, [3], attempt=0)
    builder = Builder(cavesson.record.open(folder), folder / "index")

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cavesson.index.build.add_rollups", broken)
        with pytest.raises(KeyboardInterrupt):
            builder.update()
    assert snapshot(folder / "index").rows == 24, "the rollouts are in, their roll-ups are not"
    check(folder, indexed(folder))
    assert snapshot(folder / "index").rows == 24
