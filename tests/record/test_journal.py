"""What a recorder has taken and not yet written to a segment is in its journal, which outlives the process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from record_helpers import plain, rollouts

import cavesson
from cavesson.record import Recorder, begin_attempt, compact
from cavesson.record.write.fallback_folder import recover

# Takes steps as fast as it can, and says which ones; the first is written at once, and the others within a minute.
WRITER = """
import sys
from pathlib import Path
import numpy as np
from cavesson.record import Recorder, begin_attempt

folder = Path(sys.argv[1])
out = Recorder(folder, attempt=begin_attempt(folder, 0), interval=60)
for step in range(10_000):
    lengths = (np.arange(5) * 7 + step) % 4
    rows = {"sample": np.arange(5), "prompt": ["p\\ud83d"] * 5, "response": ["r"] * 5, "reward": np.full(5, step / 8)}
    rows |= {"reward_parts": [None, {"a": np.float32(0.5)}, {}, {"b": float("nan")}, {"a": 1.0}]}
    rows |= {"group": [2, 2, 0, 1, 0]}
    mask = np.arange(4) < lengths[:, None]
    out.rollouts(step, rows, {"mask": mask, "logprob": np.full((5, 4), -step / 7, np.float32)})
    out.metrics(step, {"twice": 2.0 * step, "nan": float("nan")})
    if step % 10 == 9:
        out._queue.join()  # all of it is in the thread's hands
        print(step, flush=True)
"""


def killed_run(folder: Path) -> int:
    """Kill a process that records, and return the last step that it is known to have recorded."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(4)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.read().split()
    process.wait()
    process.stdout.close()
    return int(said[-1])


def whole(run: cavesson.Run, steps: int) -> str:
    """Everything of some steps, as one text."""
    chosen = range(steps)
    found = [run.arrow(name, steps=chosen).to_pylist() for name in ("rows", "tokens", "rollups")]
    return plain([*found, run.arrow("steps", steps=chosen).to_pylist()])


def test_a_kill_between_two_segments_loses_nothing(folder, tmp_path):
    last = killed_run(folder)
    assert len(list(folder.glob("record/rows-*"))) == 1, "the rest is in the journal only"
    run = cavesson.open(folder)
    assert run.rows(["step"])["step"].to_pylist()[: 5 * (last + 1)] == [s for s in range(last + 1) for _ in range(5)]
    assert run.steps()["twice"].to_pylist()[: last + 1] == [2.0 * step for step in range(last + 1)]
    assert not list(folder.glob("record/.*"))
    # What came from the journal is what the recorder itself would have written.
    code = WRITER.replace("range(10_000)", f"range({last + 1})") + "\nout.close()"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "other")], check=True, stdout=subprocess.DEVNULL)
    assert whole(run, last + 1) == whole(cavesson.open(tmp_path / "other"), last + 1)


def test_a_frame_that_a_kill_cut_ends_the_journal(folder):
    last = killed_run(folder)
    (path,) = folder.glob("record/.journal-*")
    os.truncate(path, path.stat().st_size - 5)
    steps = cavesson.open(folder).rows(["step"])["step"].unique().to_pylist()
    assert steps == list(range(len(steps))) and len(steps) >= last


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", [0.3, 0.301, 0.305])
def test_a_damaged_frame_ends_the_journal_and_the_rest_is_kept(folder, where, capsys):
    last = killed_run(folder)
    (path,) = folder.glob("record/.journal-*")
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * where))
        file.write(bytes(64))  # what a page holds that was never written
    content = path.read_bytes()
    run = cavesson.open(folder)
    assert "power failure" in capsys.readouterr().err
    assert (folder / "record" / f"{path.name}.damaged").read_bytes() == content
    steps = run.rows(["step"])["step"].unique().to_pylist()
    assert steps == list(range(len(steps))) and 1 < len(steps) < last
    run.arrow("tokens", steps=range(len(steps))).validate(full=True)
    assert run.steps()["twice"].to_pylist()[: len(steps) - 1] == [2.0 * step for step in steps[:-1]]


def test_a_reader_on_another_machine_leaves_the_journal_alone(folder):
    """It may not see the lock of the process that writes it."""
    killed_run(folder)
    writer = json.loads((folder / "writer.json").read_text())
    (folder / "writer.json").write_text(json.dumps(writer | {"host": "another"}))
    assert cavesson.open(folder).rows(["step"])["step"].to_pylist() == [0] * 5
    long_ago = time.time() - 4000
    os.utime(folder / "writer.json", (long_ago, long_ago))
    assert len(cavesson.open(folder).rows(["step"])) > 5


def test_recovering_twice_adds_nothing_twice(folder):
    killed_run(folder)
    (path,) = folder.glob("record/.journal-*")
    content = path.read_bytes()
    recover(folder)
    before = whole(cavesson.open(folder), 1000)
    path.write_bytes(content)  # as if it had been interrupted just before it removed the journal
    recover(folder)
    assert whole(cavesson.open(folder), 1000) == before
    compact(folder)
    path.write_bytes(content)
    recover(folder)
    assert whole(cavesson.open(folder), 1000) == before


def test_a_resumed_run_keeps_what_the_journal_had(folder):
    last = killed_run(folder)
    with Recorder(folder, attempt=begin_attempt(folder, last)) as recorder:
        recorder.rollouts(last, *rollouts(2))
    found = cavesson.open(folder).rows(["step", "attempt"]).to_pylist()
    assert [row["step"] for row in found if not row["attempt"]] == [s for s in range(last) for _ in range(5)]
    assert [row["step"] for row in found if row["attempt"]] == [last] * 2


def test_readers_leave_the_journal_of_a_running_process_alone(folder):
    with Recorder(folder, interval=60) as recorder:
        for step in range(3):
            recorder.rollouts(step, *rollouts(2))
        recorder._queue.join()
        run = cavesson.open(folder)
        assert run.rows(["step"])["step"].to_pylist() == [0, 0] and len(list(folder.glob("record/.journal-*"))) == 1
        recorder.flush()
        assert run.rows(["step"])["step"].to_pylist() == [0, 0, 1, 1, 2, 2]
    assert run.rows(["step"])["step"].to_pylist() == [0, 0, 1, 1, 2, 2] and not list(folder.glob("record/.*"))


def test_a_folder_that_may_only_be_read_can_be_read(folder, monkeypatch):
    killed_run(folder)
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if mode not in ("r", "rb"):
            raise PermissionError(13, "Permission denied")
        return opened(path, mode, *given, **named)

    monkeypatch.setattr(Path, "open", read_only)
    assert cavesson.open(folder).rows(["step"])["step"].unique().to_pylist() == [0]


def test_readers_see_a_step_within_the_interval_even_if_no_other_follows(folder):
    with Recorder(folder, interval=0.5) as recorder:
        recorder.rollouts(0, *rollouts(2))
        recorder.rollouts(1, *rollouts(2))
        recorder.metrics(1, {"loss": 1.0})
        run, deadline = cavesson.open(folder), time.monotonic() + 20
        while run.steps().num_rows == 0 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.rows(["step"])["step"].to_pylist() == [0, 0, 1, 1] and run.steps()["loss"].to_pylist() == [1.0]


def test_steps_share_their_files_and_calls_that_follow_are_added(folder):
    with Recorder(folder, interval=60) as recorder:
        for step in range(8):
            recorder.rollouts(step, *rollouts(2))
            recorder.metrics(step, {"loss": step})
        recorder.flush()
        recorder.rollouts(7, *rollouts(1, sample=[5], split=["eval"]))
        recorder.metrics(7, {"eval": 0.5})
        recorder.rollouts(8, *rollouts(2))
    run = cavesson.open(folder)
    assert [(segment.first, segment.last) for segment in run.segments()] == [(0, 0), (1, 7), (7, 8)]
    assert run.rows(["sample"], [7])["sample"].to_pylist() == [0, 1, 5]
    assert run.steps().select(["step", "loss", "eval"]).to_pylist()[-1] == {"step": 7, "loss": 7.0, "eval": 0.5}
    assert run.steps().num_rows == 8 and run.tokens(7).num_rows == 9
    before = whole(run, 9)
    compact(folder)
    assert len(run.segments()) == 1 and whole(run, 9) == before


def test_a_large_journal_is_written_early(folder, monkeypatch):
    monkeypatch.setattr("cavesson.record.write.recorder.JOURNAL_BYTES", 100_000)
    with Recorder(folder, interval=60) as recorder:
        for step in range(40):
            rows, tokens = rollouts(8, 100)
            recorder.rollouts(step, rows, tokens | {"logprob": np.zeros((8, 100))})
        recorder._queue.join()
        assert len(cavesson.open(folder).segments()) > 4


@pytest.mark.parametrize("interval", [0, 60])
def test_one_call_that_cannot_be_written_does_not_harm_the_others(folder, interval):
    recorder = Recorder(folder, interval=interval)
    for step in range(4):
        rows, tokens = rollouts(group=["not", "numbers"] if step == 2 else [1, 2])
        recorder.rollouts(step, rows, tokens)
        recorder._queue.join()
        if recorder._error is not None:
            break
    with pytest.raises(ValueError, match="not"):
        recorder.close()
    steps = cavesson.open(folder).rows(["step"])["step"].unique().to_pylist()
    assert steps == ([0, 1] if interval == 0 else [0, 1, 3])
