"""A recorder merges beside its work."""

import errno
import threading
import time
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from compaction_helpers import files, record

import cavesson
from cavesson.errors import UserError
from cavesson.record import Recorder
from cavesson.record.maintain import merger
from cavesson.record.storage import storage
from cavesson.record.write import recorder


@pytest.mark.slow
def test_the_recorder_merges_by_itself_and_few_files_remain(folder, monkeypatch):
    monkeypatch.setattr(recorder, "WAITING", 8)
    run = cavesson.open(folder)
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
    assert len(cavesson.open(folder).segments()) == 20
    assert not [thread for thread in threading.enumerate() if thread.name == "merger"]


def test_each_request_is_merged_once(folder, monkeypatch):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(merger, "compact", lambda files, rank, before, go_on: calls.append(before))
    own = merger.Merger(storage(folder), 0, failed=lambda error: None)
    for before in ((0, 3), (0, 5)):
        own.merge(before)
        wait_until(lambda before=before: before in calls)
        time.sleep(0.05)  # in which a thread that does not wait would merge thousands of times
    own.close()
    assert calls == [(0, 3), (0, 5)]


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


def test_a_merge_that_cannot_reach_the_storage_is_repeated_and_warned_of_once(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "WAITING", 2)
    merge, calls = merger.compact, []

    def failing(*given: Any, go_on: Callable[[], None]) -> int:
        calls.append(given)
        if len(calls) <= 2:
            raise ConnectionError("the line is dead\nor so")
        return merge(*given, go_on=go_on)

    monkeypatch.setattr(merger, "compact", failing)
    with Recorder(folder, fallback=tmp_path / "fallback") as out:
        for step in range(12):
            out.metrics(step, {"twice": 2.0 * step})
            out.flush()
            wait_until(lambda done=(step + 1) // 3: len(calls) == done)
        wait_until(lambda: bool(files(folder, "compactions/*")))
        assert out.unreachable is None
    run = cavesson.open(folder)
    assert run.steps()["twice"].to_pylist() == [2.0 * step for step in range(12)]
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and f"{folder} could not be merged (the line is dead)" in warning.message
