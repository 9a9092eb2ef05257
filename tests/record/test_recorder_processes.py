"""Steps that several processes record together."""

import pytest
from record_helpers import rollouts

import cavesson
from cavesson.record import Recorder, begin_attempt
from cavesson.record.maintain.compaction import compact


def test_another_process_needs_the_attempt_and_numbers_its_samples(folder):
    with pytest.raises(ValueError, match="rank 1 needs the attempt"):
        Recorder(folder, rank=1)
    with (
        Recorder(folder, attempt=0, rank=1) as recorder,
        pytest.raises(ValueError, match="are missing the required column 'sam"),
    ):
        recorder.rollouts(0, {"prompt": ["a"], "response": ["x"], "reward": [0.0]})


def test_a_step_of_several_processes_is_read_when_all_of_them_have_recorded_it(tmp_path):
    attempt = begin_attempt(tmp_path, 0, processes=3)
    recorders = [Recorder(tmp_path, attempt=attempt, rank=rank) for rank in range(3)]

    def write(rank, step):
        rows, tokens = rollouts(2)
        recorders[rank].rollouts(step, rows | {"sample": [2 * rank, 2 * rank + 1]}, tokens)
        recorders[rank].flush()

    def read():
        return cavesson.open(tmp_path).rows(["step", "sample"]).to_pylist()

    cursor = cavesson.open(tmp_path).changes(None).cursor
    for rank, step in ((0, 0), (0, 1), (2, 0), (2, 1)):
        write(rank, step)
        assert read() == []
    write(1, 0)
    assert read() == [{"step": 0, "sample": sample} for sample in range(6)]
    seen = cavesson.open(tmp_path).changes(cursor)
    assert seen.first_step == 0
    write(0, 2)
    write(1, 1)
    assert [row["step"] for row in read()] == [0] * 6 + [1] * 6
    assert cavesson.open(tmp_path).changes(seen.cursor).first_step == 1
    for recorder in recorders:
        recorder.close()

    # A resume with one process goes on where the whole steps end; what two processes had begun is superseded.
    resumed = begin_attempt(tmp_path, 2)
    with Recorder(tmp_path, attempt=resumed) as recorder:
        rows, tokens = rollouts(6)
        recorder.rollouts(2, rows, tokens)
    assert [row["step"] for row in read()] == [0] * 6 + [1] * 6 + [2] * 6


def test_merging_does_not_show_a_step_earlier(tmp_path):
    attempt = begin_attempt(tmp_path, 0, processes=2)
    recorders = [Recorder(tmp_path, attempt=attempt, rank=rank) for rank in range(2)]
    for rank, steps in ((0, 6), (1, 3)):
        for step in range(steps):
            rows, tokens = rollouts(1)
            recorders[rank].rollouts(step, rows | {"sample": [rank]}, tokens)
        recorders[rank].close()
    for rank in (None, 0, 1, None):
        compact(tmp_path, rank)
        assert cavesson.open(tmp_path).rows(["step"])["step"].to_pylist() == [0, 0, 1, 1, 2, 2]
