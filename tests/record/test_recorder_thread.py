"""The thread of a recorder: its queue, and errors in it."""

import errno
import os
import threading

import pyarrow as pa
import pytest
from record_helpers import rollouts

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder
from cavesson.record.segments import segment_name


class Slow(dict):
    """A reward's parts whose conversion waits: the disk that does not keep up."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(part=1.0)
        self.gate = gate

    def items(self):
        assert self.gate.wait(20)
        return super().items()


def test_a_full_queue_blocks_and_drops_nothing(folder):
    gate, handed_over = threading.Event(), []
    with Recorder(folder, queue_size=2) as recorder:

        def train() -> None:
            for step in range(8):
                rows, tokens = rollouts(reward_parts=[Slow(gate), None])
                recorder.rollouts(step, rows, tokens)
                handed_over.append(step)

        trainer = threading.Thread(target=train)
        trainer.start()
        trainer.join(0.5)
        # One in the writer's hands and two in the queue; the fourth call waits.
        assert handed_over == [0, 1, 2]
        assert cavesson.open(folder).segments() == []
        gate.set()
        trainer.join(20)
        assert handed_over == list(range(8))
    assert cavesson.open(folder).rows(["step"])["step"].unique().to_pylist() == list(range(8))


def test_flush_returns_when_everything_is_on_disk(folder):
    gate = threading.Event()
    with Recorder(folder) as recorder:
        rows, tokens = rollouts(reward_parts=[Slow(gate), None])
        recorder.rollouts(0, rows, tokens)
        flushed = threading.Thread(target=recorder.flush)
        flushed.start()
        flushed.join(0.2)
        assert flushed.is_alive()
        gate.set()
        flushed.join(20)
        assert len(cavesson.open(folder).segments()) == 1


def test_an_error_in_the_thread_is_raised_by_every_later_call(folder):
    rows, tokens = rollouts()
    recorder = Recorder(folder, queue_size=3)
    recorder.rollouts(0, rows, tokens)
    gate = threading.Event()
    recorder.rollouts(1, rows | {"reward_parts": [Slow(gate), "no parts"]}, tokens)
    recorder.rollouts(2, rows, tokens)
    recorder.rollouts(3, rows | {"group": ["not", "numbers"]}, tokens)
    gate.set()
    with pytest.raises(AttributeError):
        recorder.flush()
    with pytest.raises(AttributeError):
        recorder.rollouts(4, rows, tokens)
    with pytest.raises(AttributeError):
        recorder.metrics(2, {})
    with pytest.raises(AttributeError):
        recorder.close()
    # Step 2 had been handed over before anybody knew, and step 4 was refused.
    assert [segment.first for segment in cavesson.open(folder).segments()] == [0, 2]


def test_a_caller_that_waits_for_the_queue_hears_of_the_error(folder):
    rows, tokens = rollouts()
    with pytest.raises(pa.ArrowInvalid), Recorder(folder, queue_size=1) as recorder:
        for step in range(100):
            recorder.rollouts(step, rows | {"group": ["not", "numbers"]}, tokens)


def test_leaving_the_block_raises_what_went_wrong(folder):
    rows, tokens = rollouts()
    with pytest.raises(pa.ArrowInvalid), Recorder(folder) as recorder:
        recorder.rollouts(0, rows | {"prompt": [None, "b"], "group": ["x", "y"]}, tokens)


def test_a_missing_required_value_is_an_error(folder):
    rows, tokens = rollouts()
    with pytest.raises(pa.ArrowInvalid, match="prompt"), Recorder(folder) as recorder:
        recorder.rollouts(0, rows | {"prompt": [None, "b"]}, tokens)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs to know what an open file is called")
def test_a_full_disk_is_said_in_one_line_and_leaves_no_half_file(folder, monkeypatch):
    fsync = os.fsync

    def full(handle: int) -> None:
        if ".rows-00000001-" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    rows, tokens = rollouts()
    recorder = Recorder(folder)
    recorder.rollouts(0, rows, tokens)
    recorder.rollouts(1, rows, tokens)
    with pytest.raises(UserError, match=r"the disk is full.*could not be written; free space$") as caught:
        recorder.flush()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(UserError, match="the disk is full"):
        recorder.close()
    assert [segment.first for segment in cavesson.open(folder).segments()] == [0]
    assert [path.name for path in (folder / "record").glob(".*")] == [".journal-0000-0000"]
    # The rows come last: they commit.
    assert (folder / segment_name("tokens", 1, 0, 0)).exists()
    monkeypatch.undo()  # there is room again
    assert [segment.first for segment in cavesson.open(folder).segments()] == [0, 1]
    assert not list((folder / "record").glob(".*"))


def test_a_closed_recorder_takes_nothing(folder):
    recorder = Recorder(folder)
    recorder.close()
    recorder.close()
    recorder.flush()
    with pytest.raises(ValueError, match="closed"):
        recorder.rollouts(0, *rollouts())
