"""Merging segments changes no answer, whatever happens meanwhile."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_helpers import plain

import dressage
from dressage.errors import UserError
from dressage.record import (
    Recorder,
    begin_attempt,
    compact,
    compaction,
    merger,
    merging,
    recorder,
    write_rollouts,
    write_run,
)
from dressage.record.segments import write_segment

# Every number follows from step and rank, so that a line too many, too few or from elsewhere would show.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from dressage.record import Recorder, begin_attempt, recorder

recorder.WAITING = int(sys.argv[3])
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
with Recorder(folder, attempt=begin_attempt(folder, 0)) as out:
    for step in range(steps):
        lengths = (np.arange(5) * 7 + step) % 4
        rows = {"sample": np.arange(5), "prompt": ["p"] * 5, "response": ["r" * 1000] * 5, "reward": np.full(5, step)}
        rows["group"] = [2, 2, 0, 1, 0]
        mask = np.arange(4) < lengths[:, None]
        out.rollouts(step, rows, {"mask": mask, "logprob": np.full((5, 4), step % 8, np.float32)})
        out.metrics(step, {"twice": 2.0 * step})
        if step % 4 == 3:
            out.flush()
            print(step, flush=True)
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from dressage.record import compact

left = int(sys.argv[2])

def dying(method):
    def call(*given, **named):
        global left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return method(*given, **named)
    return call

Path.replace, Path.unlink = dying(Path.replace), dying(Path.unlink)
compact(sys.argv[1])
"""
COMPACTER = "import sys; from dressage.record import compact; print(compact(sys.argv[1]))"


def record(folder: Path | str, steps: range, attempt: int = 0, rank: int = 0, count: int = 3) -> None:
    """Rollouts whose numbers follow from step, sample and attempt; their groups are not in the order of the samples."""
    with Recorder(folder, attempt=attempt, rank=rank) as out:
        for step in steps:
            sample = rank * count + np.arange(count)[::-1]
            rows: dict[str, Any] = {"sample": sample, "prompt": [f"p{s}" for s in sample], "response": ["r"] * count}
            rows |= {
                "reward": step + sample / 16,
                "group": sample % 2,
                "reward_parts": [{"a": float(s)} for s in sample],
            }
            mask = np.arange(4) < ((sample + step) % 4)[:, None]
            tokens = {"mask": mask, "token_id": np.arange(4 * count).reshape(count, 4)}
            if step % 3:
                tokens["value"] = np.full((count, 4), attempt + step / 4)
            out.rollouts(step, rows, tokens)
            out.metrics(step, {f"metric/{step % 2}": step + attempt})


def answers(folder: Path | str) -> str:
    """Everything that can be read, as one text."""
    run = dressage.open(folder)
    rows, steps = run.rows(), run.steps()
    columns = sorted(steps.column_names)
    found: list[Any] = [rows.to_pylist(maps_as_pydicts="strict"), steps.select(columns).to_pylist()]
    for step in rows["step"].unique().to_pylist():
        found.append(run.tokens(step).to_pylist())
        found.append(run.rows(["reward", "sample"], [step]).to_pylist())
    for row in rows.to_pylist()[::5]:
        found.append(run.rollout(row["step"], row["sample"]).tokens.to_pylist())
    found.append(run.rollups().to_pylist())
    found.append(run.sql("SELECT step, sample, count(*), sum(value) FROM tokens GROUP BY ALL ORDER BY ALL").fetchall())
    found.append(run.sql("SELECT * FROM rows ORDER BY step, sample").fetchall())
    return plain(found)


def files(folder: Path, pattern: str = "record/*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_a_compacted_run_gives_the_same_answers_from_few_files(folder):
    record(folder, range(0, 9), attempt=begin_attempt(folder, 0))
    record(folder, range(0, 9), rank=1)
    record(folder, range(4, 12), attempt=begin_attempt(folder, 4))
    before = answers(folder)
    # 9 steps of two ranks and 8 of one have rows, tokens, roll-ups and metrics; each attempt becomes one file of each.
    assert len(files(folder)) == 4 * 26
    assert compact(folder) == 2 * 26
    assert answers(folder) == before
    assert [name.split("-c-")[0] for name in files(folder)] == sorted(["rollups", "rows", "steps", "tokens"] * 2)
    assert compact(folder) == 0
    assert answers(folder) == before


def test_lines_are_in_the_order_of_step_group_and_sample_and_say_where_their_tokens_are(folder):
    record(folder, range(5))
    record(folder, range(5), rank=1)
    compact(folder)
    (path,) = folder.glob("record/rows-c-*")
    rows = pq.ParquetFile(path).read().to_pylist()
    keys = [(row["step"], row["group"], row["sample"]) for row in rows]
    assert keys == sorted(keys) and len(keys) == 30
    tokens = pq.ParquetFile(path.with_name(path.name.replace("rows", "tokens"))).read().to_pylist()
    assert rows[0]["token_start"] == 0
    for row, following in zip(rows, [*rows[1:], {"token_start": len(tokens)}], strict=True):
        end = row["token_start"] + row["token_count"]
        mine = tokens[row["token_start"] : end]
        assert end == following["token_start"] and row["token_count"] == row["length"]
        assert [(t["step"], t["sample"]) for t in mine] == [(row["step"], row["sample"])] * row["length"]
        assert [t["position"] for t in mine] == list(range(row["length"]))


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("start"), st.integers(0, 6), st.integers(0, 3)),
            st.tuples(st.just("write"), st.integers(1, 4), st.integers(0, 1)),
            st.tuples(st.sampled_from(["compact", "compact all"]), st.integers(0, 1), st.just(0)),
        ),
        max_size=12,
    )
)
def test_a_run_that_is_compacted_at_any_time_reads_like_one_that_never_is(acts):
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / "compacted", Path(name) / "never"]
        for folder in folders:
            write_run(folder, {})
            attempt, following = begin_attempt(folder, 0), {0: 0, 1: 0}
            for act, first, second in acts:
                if act == "start":
                    attempt, following = begin_attempt(folder, first), {0: first, 1: first}
                elif act == "write":
                    steps = range(following[second], following[second] + first)
                    record(folder, steps, attempt, rank=second)
                    following[second] = steps.stop
                elif act == "compact all":  # of a run that has ended, and is continued later
                    if folder is folders[0]:
                        compact(folder)
                    end = max(following.values())
                    attempt, following = begin_attempt(folder, end), {0: end, 1: end}
                elif folder is folders[0]:
                    compact(folder, first, before=(attempt, following[first] - 1))
        assert answers(folders[0]) == answers(folders[1])


def test_what_was_merged_is_deleted_by_the_next_compaction_only(folder):
    record(folder, range(6))
    small = files(folder)
    assert compact(folder, rank=0, before=(0, 4)) == 8
    assert set(small) < set(files(folder)) and len(files(folder, "compactions/*")) == 1
    # A reader that listed the folder before can still read what it found.
    assert pq.ParquetFile(folder / "record" / "rows-00000000-0000-0000.parquet").metadata.num_rows == 3
    record(folder, range(6, 12))
    assert compact(folder, rank=0, before=(0, 10)) > 0
    assert not [name for name in files(folder) if "-0000000" in name and name.split("-")[1] in ("00000000", "00000003")]
    assert dressage.open(folder).rows(["step"])["step"].to_pylist() == [s for s in range(12) for _ in range(3)]


def test_the_recorder_merges_by_itself_and_few_files_remain(folder, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING", 8)
    run = dressage.open(folder)
    with Recorder(folder, attempt=0) as out:
        for step in range(70):
            out.rollouts(step, {"prompt": ["p"], "response": ["r"], "reward": [step]}, {"token_id": [[step, 1]]})
            out.metrics(step, {"twice": 2.0 * step})
            if step and step % 9 == 0:
                out.flush()
                # Files double, so their number grows with the logarithm: 9 small segments and the merged ones.
                wait_until(lambda: len(run.segments()) <= 8 + 8)
    assert run.rows(["step"])["step"].to_pylist() == list(range(70))
    assert run.steps()["step"].to_pylist() == list(range(70))
    assert len(files(folder, "record/rows-*")) <= 8 + 8 + 20 and len(files(folder, "compactions/*")) <= 12
    with Recorder(folder, attempt=0) as again, pytest.raises(ValueError, match="step 3 is closed"):
        again.metrics(3, {"loss": 1.0})


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_nobody_waits_for_a_merging(folder, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING", 2)
    merging, calls = Event(), []

    def endless(*given: Any, go_on: Callable[[], None]) -> int:
        calls.append(given)
        merging.set()
        while True:
            go_on()
            time.sleep(0.01)

    monkeypatch.setattr(merger, "compact", endless)
    # Each of the calls after the third asks for a merging that never ends; leaving the block gives it up.
    record(folder, range(20))
    assert merging.is_set() and len(calls) == 1
    assert len(dressage.open(folder).segments()) == 20
    assert not [thread for thread in threading.enumerate() if thread.name == "merger"]


def test_what_goes_wrong_while_merging_reaches_the_user(folder, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING", 2)

    def full(*given: Any, go_on: Callable[[], None]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(merger, "compact", full)
    with pytest.raises(UserError, match="the disk is full"), Recorder(folder) as out:
        for step in range(1000):
            out.metrics(step, {"loss": 1.0})
            out.flush()
    assert step < 999


def test_a_merging_that_is_given_up_at_any_step_changes_nothing(folder):
    class GivenUp(Exception):
        pass

    record(folder, range(5))
    before, small = answers(folder), files(folder)

    def give_up_after(calls: int) -> Callable[[], None]:
        counted = iter(range(calls))

        def go_on() -> None:
            if next(counted, None) is None:
                raise GivenUp

        return go_on

    # Before the file of rollouts, at each of its five steps, and before the file of metrics.
    for calls in range(7):
        with pytest.raises(GivenUp):
            compact(folder, rank=0, go_on=give_up_after(calls))
        assert answers(folder) == before and not files(folder, "compactions/*")
    assert compact(folder, rank=0, go_on=give_up_after(7)) == 10
    assert answers(folder) == before
    compact(folder)
    assert answers(folder) == before and len(files(folder)) == 4 < len(small)


def test_rollouts_and_metrics_may_be_merged_at_different_depths(folder, monkeypatch):
    # Three rollouts a step, and a file of more than 10 lines is not written again. The first manifest has 12 rollouts,
    # which stay, and 4 steps, which the second one replaces; the third replaces all that the second has.
    monkeypatch.setattr(compaction, "FILE_LINES", 20)
    first = 0
    for steps in (4, 2, 3, 2):
        record(folder, range(first, first + steps))
        first += steps
        before = answers(folder)
        for _ in range(2):
            compact(folder, rank=0)
            assert answers(folder) == before
    segments = dressage.open(folder).segments()
    assert [(segment.first, segment.last, segment.lines) for segment in segments][:2] == [(0, 3, 12), (4, 8, 15)]
    assert dressage.open(folder).steps()["step"].to_pylist() == list(range(11))


def test_a_run_that_may_be_written_is_merged_but_for_the_newest_step_of_each_process(folder):
    attempt = begin_attempt(folder, 0)
    record(folder, range(4), attempt, rank=1)
    with Recorder(folder, attempt=attempt) as out:
        for step in range(6):
            out.rollouts(step, {"prompt": ["p"], "response": ["r"], "reward": [step]}, {"token_id": [[1]]})
            out.metrics(step, {"loss": 1.0})
        out.flush()
        before, small = answers(folder), files(folder)
        assert compaction.may_be_written(folder)
        assert compact(folder, ended=False) == 2 * (5 + 3)
        assert answers(folder) == before
        # Nothing is deleted, and what a process had begun goes on.
        assert set(small) < set(files(folder))
        out.rollouts(5, {"prompt": ["p"], "response": ["more"], "reward": [7]}, {"token_id": [[1, 2]]})
        out.metrics(5, {"more": 1.0})
    assert dressage.open(folder).rows(["response"], [5])["response"].to_pylist() == ["r", "more"]
    for path in folder.glob("record/*"):
        os.utime(path, (0, 0))
    assert not compaction.may_be_written(folder)


def test_large_files_end_after_so_many_rollouts_and_are_not_written_again(folder, monkeypatch):
    monkeypatch.setattr(compaction, "FILE_LINES", 12)
    record(folder, range(10))
    compact(folder)
    segments = dressage.open(folder).segments()
    # Three rollouts a step: a file is full after four steps. Two files are full, the third holds the rest.
    assert [(segment.first, segment.last, segment.lines) for segment in segments] == [(0, 3, 12), (4, 7, 12), (8, 9, 6)]
    record(folder, range(10, 12))
    compact(folder)
    again = dressage.open(folder).segments()
    assert again[:2] == segments[:2] and [(s.first, s.last) for s in again[2:]] == [(8, 11)]


def test_tokens_without_a_row_do_not_come_along(folder):
    write_run(folder, {})
    rows = pa.table({"step": [0, 2], "sample": [1, 1], "prompt": ["p"] * 2, "response": ["r"] * 2, "reward": [1.0] * 2})
    tokens = pa.table({"step": [0, 0, 0, 2, 3], "sample": [0, 1, 1, 1, 1], "position": [0, 0, 1, 0, 0]})
    write_rollouts(folder, 0, rows, tokens)
    (path,) = folder.glob("record/tokens-*")
    assert [tuple(line.values()) for line in pq.ParquetFile(path).read().to_pylist()] == [
        (0, 1, 0),
        (0, 1, 1),
        (2, 1, 0),
    ]
    assert dressage.open(folder).rollout(0, 1).tokens["position"].to_pylist() == [0, 1]


def test_groups_of_large_lines_end_early(folder, monkeypatch):
    monkeypatch.setattr(merging, "GROUP_BYTES", 10_000)
    lengths = [10, 6000, 5000, 20_000, 10, 10, 9000, 2000, 10]
    for step, length in enumerate(lengths):
        with Recorder(folder, attempt=0) as out:
            out.rollouts(step, {"prompt": ["p"], "response": ["r" * length], "reward": [step]}, {"token_id": [[1]]})
    before = answers(folder)
    compact(folder)
    assert answers(folder) == before
    (path,) = folder.glob("record/rows-c-*")
    parquet = pq.ParquetFile(path)
    groups = [parquet.read_row_group(i, ["step"])["step"].to_pylist() for i in range(parquet.num_row_groups)]
    # Each line has a few hundred bytes besides; a group takes as many lines as fit below the limit, at least one.
    assert groups == [[0, 1], [2], [3], [4, 5, 6], [7, 8]]


def test_a_column_that_some_steps_lack_is_null_there_and_exact_numbers_stay_exact(folder):
    for step, value in enumerate([0.1, None, 1e300]):
        rows = pa.table({"step": [step], "sample": [0], "prompt": ["p"], "response": ["r"], "reward": [1.0]})
        tokens = pa.table({"step": [step], "sample": [0], "position": [0]})
        if value is not None:
            tokens = tokens.append_column("value", pa.array([value], pa.float64() if step else pa.float32()))
        write_segment(folder, step, 0, 0, rows, tokens)
    compact(folder)
    values = [dressage.open(folder).tokens(step)["value"].to_pylist() for step in range(3)]
    assert values == [[float(np.float32(0.1))], [None], [1e300]]


def test_nothing_is_added_to_a_step_that_is_compacted(folder):
    record(folder, range(3))
    compact(folder)
    table = pa.table({"step": [1], "sample": [9], "prompt": ["p"], "response": ["r"], "reward": [1.0]})
    tokens = pa.table({"step": [1], "sample": [9], "position": [0]})
    write_segment(folder, 1, 0, 5, table, tokens)  # another rank has nothing there yet
    with Recorder(folder) as out, pytest.raises(ValueError, match="step 1 is closed"):
        out.rollouts(
            1, {"sample": [9], "prompt": ["p"], "response": ["r"], "reward": [1.0]}, {"mask": np.ones((1, 1), bool)}
        )
    assert dressage.open(folder).rows(["sample"], [1])["sample"].to_pylist() == [0, 1, 2, 9]


def test_rollouts_of_many_steps_are_written_at_once_and_added_to(folder):
    record(folder, range(4))
    whole = answers(folder)
    run = dressage.open(folder)
    rows, tokens = run.rows(), pa.concat_tables([run.tokens(step) for step in range(4)])
    with tempfile.TemporaryDirectory() as name:
        write_run(name, {})
        # Odd samples first, then even ones of the same steps, in no order.
        for odd in (1, 0):
            parts = [table.filter(pa.array(table["sample"].to_numpy() % 2 == odd)) for table in (rows, tokens)]
            shuffled = [part.take(np.random.default_rng(0).permutation(part.num_rows)) for part in parts]
            write_rollouts(name, 0, *shuffled)
        assert len(files(Path(name), "record/rows-*")) == 2
        again = dressage.open(name)
        assert plain(again.rows().to_pylist()) == plain(rows.to_pylist())
        assert plain(again.tokens(2).to_pylist()) == plain(run.tokens(2).to_pylist())
        compact(name)
        assert len(files(Path(name), "record/rows-*")) == 1
        assert plain(again.rows().to_pylist()) == plain(rows.to_pylist())
        assert plain(again.rollups().to_pylist()) == plain(run.rollups().to_pylist())
    assert answers(folder) == whole


def check_whole(run: Any) -> list[int]:
    """Checks that what is there follows from its step, and returns the steps."""
    rows = run.rows(["step", "sample", "reward", "length"])
    steps = rows["step"].unique().to_pylist()
    assert rows.num_rows == 5 * len(steps) and steps == list(range(len(steps)))
    step, sample = rows["step"].to_numpy(), rows["sample"].to_numpy()
    np.testing.assert_array_equal(sample, np.tile(np.arange(5), len(steps)))
    np.testing.assert_array_equal(rows["reward"].to_numpy(), step)
    np.testing.assert_array_equal(rows["length"].to_numpy(), (sample * 7 + step) % 4)
    tokens = run.arrow("tokens", ["step", "sample", "position", "logprob"], steps)
    expected = [(s, i, p) for s in steps for i in range(5) for p in range((i * 7 + s) % 4)]
    assert list(zip(*(tokens[name].to_pylist() for name in ("step", "sample", "position")), strict=True)) == expected
    np.testing.assert_array_equal(tokens["logprob"].to_numpy(), tokens["step"].to_numpy() % 8)
    metrics = run.steps()
    np.testing.assert_array_equal(metrics["twice"].to_numpy() if len(metrics) else [], 2 * metrics["step"].to_numpy())
    return list(steps)


def start(*words: object) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", *map(str, words)], stdout=subprocess.PIPE, text=True)


def test_a_process_killed_while_it_compacts_loses_nothing(folder):
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    for trial in range(3):
        process = start(WRITER, folder, 100_000, 3)
        assert process.stdout is not None
        flushed = [int(process.stdout.readline()) for _ in range(chance.randint(2, 6))]
        time.sleep(chance.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        flushed += map(int, process.stdout.read().split())
        process.wait()
        process.stdout.close()
        steps = check_whole(dressage.open(folder))
        assert steps[: flushed[-1] + 1] == list(range(flushed[-1] + 1)), f"seed {seed}, trial {trial}"
    before = answers(folder)
    compact(folder)
    assert answers(folder) == before
    assert not [name for name in files(folder) if name[:4] in ("rows", "step") and name.split("-")[1] != "c"]


def test_a_compaction_killed_before_any_of_its_renames_and_deletions_loses_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "ABANDONED", -1)
    record(folder, range(2))
    before = answers(folder)
    # Four large files and a manifest are renamed, then two steps' four files each deleted.
    for moment in range(5 + 8 + 1):
        copy = tmp_path / f"killed-{moment}"
        shutil.copytree(folder, copy)
        process = start(KILLED, copy, moment)
        process.communicate()
        assert process.returncode == (-signal.SIGKILL if moment < 13 else 0), moment
        assert answers(copy) == before, moment
        compact(copy)
        compact(copy)
        assert answers(copy) == before, moment
        assert len(files(copy)) == 4 and len(files(copy, "compactions/all-*")) == 1, moment


def test_a_reader_is_right_at_every_moment_of_writing_and_compacting(folder):
    process = start(WRITER, folder, 40, 3)
    seen: list[int] = []
    while process.poll() is None:
        before, seen = seen, check_whole(dressage.open(folder))
        assert seen[: len(before)] == before
    process.communicate()
    assert process.returncode == 0 and check_whole(dressage.open(folder)) == list(range(40))


def test_of_two_compactions_of_the_same_files_one_counts(folder):
    for first in range(0, 24, 8):
        record(folder, range(first, first + 8))
        before = answers(folder)
        processes = [start(COMPACTER, folder) for _ in range(3)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        assert answers(folder) == before


def test_a_manifest_that_lost_the_race_counts_neither_now_nor_later(folder):
    record(folder, range(4))
    before = answers(folder)
    compact(folder, rank=0)
    (winner,) = folder.glob("compactions/*")
    content = json.loads(winner.read_text())
    # The same sources merged once more, under a name that comes later.
    for segment in content["rows"] + content["steps"]:
        for path in folder.glob(f"record/*-{segment['stem']}.parquet"):
            path.with_name(path.name.replace(segment["stem"], segment["stem"] + "f")).write_bytes(path.read_bytes())
        segment["stem"] += "f"
    (folder / "compactions" / "9999-f.json").write_text(json.dumps(content))
    assert answers(folder) == before
    compact(folder)
    compact(folder)
    assert answers(folder) == before
    assert len(files(folder, "compactions/*")) == 1
