"""Two imports into one folder, and a folder that goes away: real processes."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cavesson.record import open as open_run

COMMAND = [sys.executable, "-m", "cavesson", "import"]
LINES = 60_000


def line(step: int) -> str:
    return json.dumps({"prompt": "p" * 200, "response": "r", "reward": 0.5, "step": step}) + "\n"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def run_import(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(line(i // 100) for i in range(LINES)))
    return source


def halfway(source: Path, run: Path) -> subprocess.Popen[str]:
    """An import that stands still in the middle."""
    process = subprocess.Popen([*COMMAND, str(source), str(run)], stdout=subprocess.PIPE, text=True)
    wait_for((run.parent / ".run.unfinished" / "run.json").exists)
    process.send_signal(signal.SIGSTOP)
    return process


@pytest.mark.slow
def test_the_second_import_is_told_who_the_first_is(source: Path, tmp_path: Path) -> None:
    first = halfway(source, tmp_path / "run")
    try:
        second = run_import(source, tmp_path / "run")
    finally:
        first.send_signal(signal.SIGCONT)
    assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
    assert f"is being written by process {first.pid} on " in second.stderr
    out, _ = first.communicate(timeout=120)
    assert first.returncode == 0 and f"{LINES} rollouts" in out
    assert open_run(tmp_path / "run").rows(["step"]).num_rows == LINES
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".run")]
    assert not {".lock", "writer.json"} & {path.name for path in (tmp_path / "run").iterdir()}
    assert "exists and is not an empty folder" in run_import(source, tmp_path / "run").stderr


@pytest.mark.slow
def test_what_a_killed_import_leaves_is_cleared_away_by_the_next(source: Path, tmp_path: Path) -> None:
    first = halfway(source, tmp_path / "run")
    first.kill()
    first.communicate()
    unfinished = tmp_path / ".run.unfinished"
    assert (unfinished / "writer.json").exists() and not (tmp_path / "run").exists()
    (unfinished / "rejected.jsonl").write_text("{}\n")  # as if it had been killed a little later
    (unfinished / "record").mkdir(exist_ok=True)
    (unfinished / "record" / "rows-c-left.parquet").touch()
    second = run_import(source, tmp_path / "run")
    assert second.returncode == 0, second.stderr
    assert open_run(tmp_path / "run").rows(["step"]).num_rows == LINES
    assert not (tmp_path / "run" / "rejected.jsonl").exists()
    assert not (tmp_path / "run" / "record" / "rows-c-left.parquet").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".run")]


def following(source: Path, run: Path) -> subprocess.Popen[str]:
    source.write_text(line(0))
    process = subprocess.Popen([*COMMAND, str(source), str(run), "--follow"], stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (run / "run.json").exists() and open_run(run).rows(["step"]).num_rows == 1)
    return process


@pytest.mark.slow
def test_two_that_follow_into_one_folder(tmp_path: Path) -> None:
    first = following(tmp_path / "in.jsonl", tmp_path / "run")
    second = run_import(tmp_path / "in.jsonl", tmp_path / "run", "--follow")
    assert second.returncode == 2 and "exists and is not an empty folder" in second.stderr
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 0 and not (tmp_path / "run" / "writer.json").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gone", ["", "record"])
def test_a_folder_that_is_deleted_ends_following(tmp_path: Path, gone: str) -> None:
    process = following(tmp_path / "in.jsonl", tmp_path / "run")
    # Moved and not deleted file by file: the importer may look while files are still being deleted.
    (tmp_path / "run" / gone).rename(tmp_path / "gone")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    expected = f"cavesson: {tmp_path / 'run' / gone} was deleted or moved while it was being written"
    assert err.strip().splitlines()[-1] == expected
    assert not (tmp_path / "run" / "record").exists()
