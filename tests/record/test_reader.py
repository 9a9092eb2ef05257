import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import rollouts

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder, begin_attempt, compact, write_run
from cavesson.record import storage as storage_module
from cavesson.record.segments import segment_name
from cavesson.record.tables import Tables
from cavesson.record.write.writing import write_segment

BATCH = 5

# Every number follows from the step, so that a mixture of steps or a half-written one would show.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from cavesson.record import Recorder, begin_attempt

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
attempt = begin_attempt(folder, 0)
with Recorder(folder, attempt=attempt) as recorder:
    for step in range(steps):
        lengths = (np.arange(5) * 7 + step) % 4
        rows = {"sample": np.arange(5), "prompt": ["p"] * 5, "response": ["r" * 1000] * 5, "reward": np.full(5, step)}
        mask = np.arange(4) < lengths[:, None]
        recorder.rollouts(step, rows, {"mask": mask, "logprob": np.full((5, 4), step, np.float32)})
        recorder.metrics(step, {"twice": 2.0 * step})
        recorder.flush()
        print(step, flush=True)
"""


def write_in_another_process(folder: Path, steps: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITER, str(folder), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check_whole(run) -> list[int]:
    """Check that what is there follows from its step, and return the steps."""
    rows = run.rows(["step", "sample", "reward", "length"]).to_pylist()
    steps = sorted({row["step"] for row in rows})
    assert [(row["step"], row["sample"]) for row in rows] == [(step, i) for step in steps for i in range(BATCH)]
    for row in rows:
        assert row["reward"] == row["step"]
        assert row["length"] == (row["sample"] * 7 + row["step"]) % 4
    for step in steps:
        tokens = run.tokens(step)
        expected = [(i, p) for i in range(BATCH) for p in range((i * 7 + step) % 4)]
        assert list(zip(tokens["sample"].to_pylist(), tokens["position"].to_pylist(), strict=True)) == expected
        assert set(tokens["logprob"].to_pylist()) == {float(step)}
    assert all(row["twice"] == 2 * row["step"] for row in run.steps().to_pylist())
    return steps


@pytest.mark.slow
def test_a_killed_process_leaves_every_flushed_step_and_nothing_broken(folder):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for trial in range(4):
        process = write_in_another_process(folder, 10_000)
        flushed = [int(process.stdout.readline()) for _ in range(chance.randint(1, 40))]
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        flushed += map(int, process.stdout.read().split())
        process.wait()
        process.stdout.close()
        run = cavesson.open(folder)
        steps = check_whole(run)
        assert steps[: len(flushed)] == flushed, f"seed {seed}, trial {trial}"
        assert len(steps) - len(flushed) in (0, 1)
        assert run.steps().num_rows in (len(flushed), len(flushed) + 1)


@pytest.mark.slow
def test_a_reader_sees_whole_steps_while_another_process_writes(folder):
    process = write_in_another_process(folder, 60)
    seen = []
    while process.poll() is None:
        run = cavesson.open(folder)
        before = seen
        seen = check_whole(run)
        assert seen[: len(before)] == before
        counts = run.sql(
            "SELECT count(*), count(*) FILTER (t.n = r.length OR (t.n IS NULL AND r.length = 0)) FROM rows r "
            "LEFT JOIN (SELECT step, sample, count(*) AS n FROM tokens GROUP BY ALL) t USING (step, sample)"
        ).fetchall()[0]
        assert counts[0] == counts[1] and counts[0] % BATCH == 0
    assert process.returncode == 0
    process.stdout.close()
    assert check_whole(cavesson.open(folder)) == list(range(60))


def test_tokens_without_rows_are_not_committed(folder):
    with Recorder(folder, interval=0) as recorder:
        recorder.rollouts(0, *rollouts())
        recorder.rollouts(1, *rollouts())
        recorder.rollouts(2, *rollouts())
    (folder / segment_name("rows", 1, 0, 0)).unlink()
    (folder / segment_name("tokens", 2, 0, 0)).unlink()
    run = cavesson.open(folder)
    assert [segment.first for segment in run.segments()] == [0]
    assert run.rows()["step"].unique().to_pylist() == [0]
    assert run.tokens(1).num_rows == 0
    assert run.sql("SELECT DISTINCT step FROM tokens").fetchall() == [(0,)]


def test_hidden_and_foreign_files_are_not_read(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, *rollouts())
    for name in (".rows-00000001-0000-0000.parquet", "notes.txt", "rows-1.parquet"):
        (folder / "record" / name).write_text("half")
    assert cavesson.open(folder).rows().num_rows == 2


def test_attempts_are_numbered_from_zero(folder):
    assert [begin_attempt(folder, start) for start in (0, 5, 3)] == [0, 1, 2]
    assert sorted(path.name for path in (folder / "attempts").iterdir()) == ["0000.json", "0001.json", "0002.json"]


def record(folder: Path, attempt: int, steps: range) -> None:
    with Recorder(folder, attempt=attempt, interval=0) as recorder:
        for step in steps:
            rows, tokens = rollouts(1, 1)
            recorder.rollouts(step, rows | {"reward": [float(attempt)]}, tokens | {"value": tokens["mask"] * attempt})
            recorder.metrics(step, {"attempt_number": attempt})


def test_a_resumed_run_shows_the_later_attempt_and_keeps_the_earlier_on_disk(folder):
    record(folder, begin_attempt(folder, 0), range(0, 5))
    record(folder, begin_attempt(folder, 3), range(3, 4))
    run = cavesson.open(folder)
    # Attempt 0 had got to step 4, attempt 1 began again at step 3 and has not reached step 4 yet.
    assert [(r["step"], r["attempt"]) for r in run.rows().to_pylist()] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert [(r["step"], r["attempt"]) for r in run.steps().to_pylist()] == [(0, 0), (1, 0), (2, 0), (3, 1)]
    assert len(list((folder / "record").glob("rows-*"))) == 6


@pytest.mark.slow
@settings(max_examples=min(25, settings.default.max_examples))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=4))
def test_attempts_like_a_notebook_that_is_torn_off_at_each_start(starts):
    """The slow version: whoever starts at a step tears off that page and all after it, then writes on."""
    notebook: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name), {})
        for start, count in starts:
            attempt = begin_attempt(Path(name), start)
            record(Path(name), attempt, range(start, start + count))
            notebook = {step: a for step, a in notebook.items() if step < start}
            notebook |= dict.fromkeys(range(start, start + count), attempt)
        run = cavesson.open(Path(name))
        rows = [(row["step"], row["attempt"], row["reward"]) for row in run.rows().to_pylist()]
        assert rows == [(step, attempt, attempt) for step, attempt in sorted(notebook.items())]
        assert [(r["step"], r["attempt_number"]) for r in run.steps().to_pylist()] == sorted(notebook.items())
        for step in range(10):
            values = [float(notebook[step])] if step in notebook else []
            assert run.tokens(step)["value"].to_pylist() == values


def test_several_ranks_are_one_step(folder):
    for rank in (1, 0):
        with Recorder(folder, attempt=0, rank=rank) as recorder:
            recorder.rollouts(0, *rollouts(2, 2, sample=[2 - 2 * rank, 3 - 2 * rank]))
    run = cavesson.open(folder)
    assert [(r["rank"], r["sample"]) for r in run.rows().to_pylist()] == [(1, 0), (1, 1), (0, 2), (0, 3)]
    assert run.tokens(0)["sample"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert run.tokens(0, 2)["sample"].to_pylist() == [2, 2]
    assert run.rollout(0, 3).row["rank"] == 0


@pytest.mark.parametrize("state", ["as written", "compacted", "places unknown", "places of another file"])
def test_the_tokens_of_some_rollouts_are_those_of_the_step_that_are_theirs(state, folder):
    chance = np.random.default_rng(3)
    for rank in (0, 1):
        with Recorder(folder, attempt=0, rank=rank) as recorder:
            for step in range(3):
                rows, _ = rollouts(8, sample=2 * np.arange(8) + rank)
                mask = np.arange(9) < chance.integers(0, 10, 8)[:, None]
                recorder.rollouts(step, rows, {"mask": mask, "value": chance.normal(size=(8, 9)).astype(np.float32)})
    if state == "compacted":
        compact(folder)
    for file in folder.glob("record/rows-*") if state.startswith("places") else ():
        table = pq.read_table(file)
        table = table.drop_columns("token_start")
        if state == "places of another file":
            table = table.append_column("token_start", pa.array(chance.permutation(table.num_rows), pa.int64()))
        pq.write_table(table, file)
    run = cavesson.open(folder)
    for samples in ([], [4], [15, 3, 4], [0, 99], range(16)):
        whole = run.tokens(1)
        expected = whole.filter(pa.array(np.isin(whole["sample"], list(samples))))
        assert run.tokens_of([(1, sample) for sample in samples]).equals(expected)
    of_two_steps = [(2, 5), (0, 1), (2, 0)]
    parts = [run.tokens(0, 1), run.tokens(2, 0), run.tokens(2, 5)]
    assert run.tokens_of(of_two_steps).equals(pa.concat_tables(parts))


def test_steps_of_a_rank_that_is_compacted_and_of_one_that_is_not_are_in_order(folder):
    for rank in (0, 1):
        for step in range(4):
            rows, tokens = (
                pa.table({"step": [step] * 2, "sample": [rank, rank + 2], **columns})
                for columns in ({"prompt": ["", ""], "response": ["", ""], "reward": [0.0, 0.0]}, {"position": [0, 0]})
            )
            write_segment(folder, 0, rank, Tables(rows, tokens))
        if rank == 0:
            compact(folder)
    run = cavesson.open(folder)
    assert len(run.segments()) == 5
    expected = [(step, sample) for step in range(4) for sample in range(4)]
    assert [(row["step"], row["sample"]) for row in run.rows(["step", "sample"]).to_pylist()] == expected


def test_columns_and_steps_can_be_chosen(folder):
    with Recorder(folder) as recorder:
        for step in range(4):
            recorder.rollouts(step, *rollouts(1))
    table = cavesson.open(folder).rows(["step", "reward"], steps=[3, 1])
    assert table.to_pylist() == [{"step": 1, "reward": 0.0}, {"step": 3, "reward": 0.0}]


def test_files_of_an_older_schema_are_read_with_nulls(folder):
    old_rows = pa.table({"step": [0], "sample": [0], "prompt": ["p"], "response": ["r"], "reward": [1]})
    old_tokens = pa.table({"step": [0], "sample": [0], "position": [0], "logprob": [0.1]})
    write_segment(folder, 0, 0, Tables(old_rows, old_tokens))
    with Recorder(folder) as recorder:
        recorder.rollouts(1, *rollouts(1, 1, group=[7]))
    run = cavesson.open(folder)
    assert run.rows(["reward", "group"]).to_pylist() == [{"reward": 1.0, "group": None}, {"reward": 0.0, "group": 7}]
    assert run.rows(["group"]).to_pylist() == [{"group": None}, {"group": 7}]
    assert run.fetch([(1, 0), (0, 0)], ["group"]).to_pylist() == [{"group": 7}, {"group": None}]
    assert run.tokens(0)["logprob"].to_pylist() == [0.1]
    assert run.sql('SELECT step, "group", kl_k1 FROM rows ORDER BY step').fetchall() == [(0, None, None), (1, 7, None)]
    assert run.sql("SELECT logprob FROM tokens ORDER BY step").fetchall() == [(0.1,), (None,)]


def test_the_folder_is_no_pattern_to_a_query(folder):
    for name in (folder.name, "run 1 and 'é'"):
        with Recorder(folder.with_name(name)) as recorder:
            recorder.rollouts(0, *rollouts(1, prompt=[name]))
    assert cavesson.open(folder).sql("SELECT prompt, step FROM rows").fetchall() == [(folder.name, 0)]


def test_an_empty_run_has_every_column_and_no_row(folder):
    run = cavesson.open(folder)
    assert run.rows().num_rows == run.tokens(0).num_rows == run.steps().num_rows == 0
    assert run.sql("SELECT reward_parts, logprob FROM rows, tokens, steps").fetchall() == []


def test_a_rollout_that_is_not_there_is_named(folder):
    with Recorder(folder) as recorder:
        recorder.rollouts(0, *rollouts(2))
    with pytest.raises(UserError, match="no sample 2 in step 0, which has 2 rollouts"):
        cavesson.open(folder).rollout(0, 2)


def test_no_run_folder_is_said(tmp_path):
    with pytest.raises(UserError, match=r"no run\.json"):
        cavesson.open(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        cavesson.open(tmp_path)


def test_what_is_there_is_remembered_until_it_changes(folder, monkeypatch):
    listed, names = [], storage_module.Folder.names

    def counted(self: storage_module.Folder, name: str) -> list[str]:
        listed.append(name)
        return names(self, name)

    monkeypatch.setattr(storage_module.Folder, "names", counted)
    attempt = begin_attempt(folder, 0)
    run = cavesson.open(folder)
    with Recorder(folder, attempt=attempt) as recorder:
        for step in range(4):
            recorder.rollouts(step, *rollouts(1))
            recorder.flush()
            assert run.rows(["step"])["step"].to_pylist() == list(range(step + 1))
    compact(folder)
    for path in (folder / name for name in ("record", "compactions", "attempts")):
        os.utime(path, (0, 0))
    assert run.rows(["step"])["step"].to_pylist() == [0, 1, 2, 3]
    listed.clear()
    assert run.rows(["step"])["step"].to_pylist() == [0, 1, 2, 3] and listed == []
    # An attempt hides what comes after its start, a step that is recorded shows, whatever was remembered.
    again = begin_attempt(folder, 1)
    assert run.rows(["step"])["step"].to_pylist() == [0]
    with Recorder(folder, attempt=again) as recorder:
        recorder.rollouts(1, *rollouts(2))
    assert run.rows(["step"])["step"].to_pylist() == [0, 1, 1]


def test_a_key_that_is_there_twice_moves_no_other_one(folder):
    """An attempt should not record steps before its start; if one did, the other rollouts are still themselves."""
    for start, steps in ((0, (0, 1)), (2, (1, 2))):
        with Recorder(folder, attempt=begin_attempt(folder, start)) as recorder:
            for step in steps:
                recorder.rollouts(step, *rollouts(3, response=[f"{step} {sample}" for sample in range(3)]))
    keys = [(2, 1), (1, 0), (0, 2), (1, 2), (2, 0)]
    found = cavesson.open(folder).fetch(keys, ["step", "sample", "response"])
    assert found["response"].to_pylist() == [f"{step} {sample}" for step, sample in keys]
