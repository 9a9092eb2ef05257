"""Merging segments changes no answer, whatever happens meanwhile."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from compaction_helpers import answers, files, record
from hypothesis import given, settings
from hypothesis import strategies as st

import cavesson
from cavesson.record import Recorder, begin_attempt, compact, write_run
from cavesson.record.maintain import compaction
from cavesson.record.tables import Tables
from cavesson.record.write.writing import write_segment


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


@pytest.mark.slow
@settings(max_examples=min(15, settings.default.max_examples))
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
    assert cavesson.open(folder).rows(["step"])["step"].to_pylist() == [s for s in range(12) for _ in range(3)]


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


@pytest.mark.slow
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
    segments = cavesson.open(folder).segments()
    assert [(segment.first, segment.last, segment.lines) for segment in segments][:2] == [(0, 3, 12), (4, 8, 15)]
    assert cavesson.open(folder).steps()["step"].to_pylist() == list(range(11))


def test_a_run_that_is_written_is_merged_but_for_the_newest_step_of_each_process(folder):
    attempt = begin_attempt(folder, 0)
    record(folder, range(4), attempt, rank=1)
    with Recorder(folder, attempt=attempt, interval=0) as out:
        for step in range(6):
            out.rollouts(step, {"prompt": ["p"], "response": ["r"], "reward": [step]}, {"token_id": [[1]]})
            out.metrics(step, {"loss": 1.0})
        out.flush()
        before, small = answers(folder), files(folder)
        assert compact(folder, ended=False) == 2 * (5 + 3)
        assert answers(folder) == before
        # Nothing is deleted, and what a process had begun goes on.
        assert set(small) < set(files(folder))
        out.rollouts(5, {"prompt": ["p"], "response": ["more"], "reward": [7]}, {"token_id": [[1, 2]]})
        out.metrics(5, {"more": 1.0})
    assert cavesson.open(folder).rows(["response"], [5])["response"].to_pylist() == ["r", "more"]


def test_nothing_is_added_to_a_step_that_is_compacted(folder):
    record(folder, range(3))
    compact(folder)
    table = pa.table({"step": [1], "sample": [9], "prompt": ["p"], "response": ["r"], "reward": [1.0]})
    tokens = pa.table({"step": [1], "sample": [9], "position": [0]})
    write_segment(folder, 0, 5, Tables(table, tokens))  # another rank has nothing there yet
    with Recorder(folder) as out, pytest.raises(ValueError, match="step 1 is closed"):
        out.rollouts(
            1, {"sample": [9], "prompt": ["p"], "response": ["r"], "reward": [1.0]}, {"mask": np.ones((1, 1), bool)}
        )
    assert cavesson.open(folder).rows(["sample"], [1])["sample"].to_pylist() == [0, 1, 2, 9]
