"""Large files are read in parts, by several processes: what comes of it is what one reader finds."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cavesson
from cavesson.errors import UserError
from cavesson.importers import import_run, importing, processes
from cavesson.importers.batch import RolloutBuffer
from cavesson.importers.reading import File


def a_line(random: np.random.Generator, step: int) -> bytes:
    """A rollout, or now and then something broken, empty, or of another shape."""
    size = int(random.integers(0, 12))
    line = {"prompt": f"p{random.integers(5)}", "response": "好" * size, "reward": random.normal(), "step": step}
    line |= {"response_tokens": ["好"] * size, "logprobs": random.normal(size=size).tolist(), "other": size}
    line["ref_logprobs"] = random.normal(size=size).astype(np.float32).astype(float).tolist()
    kind = random.integers(12)
    if kind == 0:
        return json.dumps(line).encode()[: int(random.integers(1, 20))]
    if kind == 1:
        line |= {"logprobs": [*line["logprobs"], None, 2**60], "step": int(random.integers(4))}
    if kind == 2:
        line.pop("ref_logprobs")
    return b"" if kind == 3 else json.dumps(line).encode()


def write(folder: Path, seed: int, lines: int, files: int = 2) -> None:
    random = np.random.default_rng(seed)
    folder.mkdir()
    for rank in range(files):
        content = b"\n".join(a_line(random, step // 5) for step in range(lines))
        (folder / f"rank{rank}.jsonl").write_bytes(content + random.choice([b"", b"\n"]))


def result(run: Path) -> tuple[dict, dict, list[dict]]:
    opened = cavesson.open(run)
    kept = (run / "rejected.jsonl").read_text().splitlines() if (run / "rejected.jsonl").exists() else []
    rollups = opened.arrow("rollups", ["step", "column", "count", "min", "max", "sketch_counts", "bin_counts"])
    return (
        opened.rows().to_pydict(),
        opened.arrow("tokens").to_pydict() | rollups.to_pydict(),
        list(map(json.loads, kept)),
    )


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(300, 3000))
def test_files_cut_anywhere_hold_the_same(seed, lines, size):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        write(folder / "in", seed, lines)
        good = b'{"prompt": "", "response": "", "reward": 0, "step": 0}'
        (folder / "in" / "rank7.jsonl").write_bytes(good)
        whole = import_run(folder / "in", folder / "whole", "rl-logging-board")
        patch.setattr(importing, "AT_ONCE", size)
        patch.setattr(processes, "MAX_PROCESSES", 1)
        cut = import_run(folder / "in", folder / "cut", "rl-logging-board")
        assert cut._replace(quotes=[]) == whole._replace(quotes=[])
        assert cut.quotes == whole.quotes
        assert result(folder / "cut") == result(folder / "whole")


@pytest.mark.usefixtures("alone")
def test_several_processes_find_the_same_as_one(tmp_path, monkeypatch):
    write(tmp_path / "in", 1, 300)
    monkeypatch.setattr(processes, "MAX_PROCESSES", 1)
    one = import_run(tmp_path / "in", tmp_path / "one", "rl-logging-board")
    monkeypatch.setattr(importing, "AT_ONCE", 4000)
    monkeypatch.setattr(processes, "MAX_PROCESSES", 3)
    monkeypatch.setattr(processes, "usable_processors", lambda: 8)
    note_processes(monkeypatch, tmp_path / "processes")
    several = import_run(tmp_path / "in", tmp_path / "several", "rl-logging-board")
    assert len(list((tmp_path / "processes").iterdir())) == 3
    assert one.rejected > 10 and one.rollouts > 400
    rows = cavesson.open(tmp_path / "one").rows(["step", "sample"])
    for step in set(rows["step"].to_pylist()):
        samples = rows.filter(pc.equal(rows["step"], step))["sample"].to_pylist()
        assert sorted(samples) == list(range(len(samples)))
    assert several == one
    assert result(tmp_path / "several") == result(tmp_path / "one")
    assert len(cavesson.open(tmp_path / "several").segments()) > 10


@pytest.fixture
def alone(monkeypatch):
    """As if this process had no other thread; under pytest-xdist it has one, which only waits."""
    monkeypatch.setattr(processes, "active_count", lambda: 1)


def note_processes(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let every process that reads leave a file, and so slowly that all of them have something to do."""
    folder.mkdir()
    read = RolloutBuffer.read

    def noted(self, portion):
        (folder / str(os.getpid())).touch()
        time.sleep(0.02)
        return read(self, portion)

    monkeypatch.setattr(RolloutBuffer, "read", noted)


def test_a_program_with_other_threads_is_not_copied(tmp_path, monkeypatch):
    write(tmp_path / "in", 1, 300)
    monkeypatch.setattr(importing, "AT_ONCE", 4000)
    monkeypatch.setattr(processes, "usable_processors", lambda: 8)
    note_processes(monkeypatch, tmp_path / "processes")
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        import_run(tmp_path / "in", tmp_path / "run", "rl-logging-board")
    finally:
        done.set()
        other.join()
    assert [path.name for path in (tmp_path / "processes").iterdir()] == [str(os.getpid())]


def test_parts_are_whole_lines_and_all_of_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"a\n\nbbbb\ncc\n" + b"d" * 30 + b"\ne")
    whole = [(r.offset, r.content) for r in File(path).read(last=True)]
    for size in range(1, 60):
        parts = list(File(path, 3).parts(size))
        assert [(r.offset, r.content) for part in parts for r in part.read(last=True)] == whole
        assert sum(part.lines for part in parts) == 6 and {part.rank for part in parts} == {3}


def test_small_files_are_read_together_and_large_ones_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "AT_ONCE", 5000)
    line = b'{"input": "p", "output": "r", "score": 1, "step": %d, "extra": "' + b"x" * 930 + b'"}\n'
    assert len(line % 0) == 996
    for step, count in enumerate([1, 1, 1, 1, 1, 13, 1]):
        (tmp_path / f"{step}.jsonl").write_bytes(line % step * count)
    seen = []
    monkeypatch.setattr(
        importing, "read_parts", lambda portions, processes, *_: seen.append((list(portions), processes)) or []
    )
    with pytest.raises(UserError, match="no records were found"):
        import_run(tmp_path, tmp_path / "run", "verl")
    ((portions, processes),) = seen
    # Of 996 bytes a line: six files until 5000 bytes are there, of which the last is cut after the first line that
    # ends behind 5000 bytes.
    assert [[(p.path.name, p.size() // 996) for p in portion] for portion in portions] == [
        [("0.jsonl", 1), ("1.jsonl", 1), ("2.jsonl", 1), ("3.jsonl", 1), ("4.jsonl", 1), ("5.jsonl", 6)],
        [("5.jsonl", 6)],
        [("5.jsonl", 1), ("6.jsonl", 1)],
    ]
    assert processes == 1 + 19 * 996 // 20_000


@pytest.mark.usefixtures("alone")
def test_a_process_that_is_killed_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    write(tmp_path / "in", 1, 300)
    monkeypatch.setattr(importing, "AT_ONCE", 4000)
    monkeypatch.setattr(processes, "usable_processors", lambda: 8)
    here = os.getpid()
    monkeypatch.setattr(
        RolloutBuffer, "write", lambda self, first: os.getpid() != here and os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(UserError, match=r"a process of the import ended early \(exit code -9\)"):
        import_run(tmp_path / "in", tmp_path / "run", "rl-logging-board")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.usefixtures("alone")
def test_what_goes_wrong_in_a_process_is_raised_here(tmp_path, monkeypatch):
    write(tmp_path / "in", 1, 300)
    monkeypatch.setattr(importing, "AT_ONCE", 4000)
    monkeypatch.setattr(processes, "usable_processors", lambda: 8)
    monkeypatch.setattr(processes._Process, "write", lambda self, first: self._ask("write", {}))
    with pytest.raises(KeyError):
        import_run(tmp_path / "in", tmp_path / "run", "rl-logging-board")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


IMPORT = "from cavesson.importers import import_run; import_run(sys.argv[1], sys.argv[2], 'rl-logging-board')"
COMMAND = "sys.argv[1:1] = ['import', '--format', 'rl-logging-board']; from cavesson.cli import main; main()"


def a_slow_import(tmp_path: Path, how: str = IMPORT) -> subprocess.Popen[bytes]:
    """An import that has written something and has much to do."""
    write(tmp_path / "in", 1, 3000, files=1)
    slow = "import cavesson.importers.importing as i, cavesson.importers.processes as p, sys; i.AT_ONCE = 500; "
    slow += "p.usable_processors = lambda: 2; import time; read = p.RolloutBuffer.read; "
    slow += "p.RolloutBuffer.read = lambda batch, portion: (time.sleep(0.02), read(batch, portion))[1]; "
    slow += how
    # Whoever was started in the background ignores Ctrl-C, and so would its children.
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-c", slow, str(tmp_path / "in"), str(tmp_path / "run")]
    process = subprocess.Popen(command, preexec_fn=listens, start_new_session=True, stderr=subprocess.PIPE)
    hidden = tmp_path / ".run.unfinished" / "record"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (hidden.exists() and any(hidden.iterdir())):
        time.sleep(0.05)
    return process


def test_ctrl_c_ends_an_import_and_leaves_nothing(tmp_path):
    process = a_slow_import(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # a terminal tells all of them
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert said.decode().count("KeyboardInterrupt") == 1, said.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_sigterm_ends_a_command_that_imports_with_a_line_and_leaves_nothing(tmp_path):
    process = a_slow_import(tmp_path, COMMAND)
    os.killpg(process.pid, signal.SIGTERM)  # as schedulers do
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.decode()) == (143, "cavesson: interrupted by SIGTERM\n")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_import_that_is_killed_leaves_no_processes(tmp_path):
    process = a_slow_import(tmp_path)
    others = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.wait()
    assert len(others) == 2
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and any(map(is_running, others)):
        time.sleep(0.05)
    assert not any(map(is_running, others))


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
