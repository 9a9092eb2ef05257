"""`--processes N`: real processes that train, make mistakes, are killed and are interrupted."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import cavesson
from cavesson.train.checkpoint import latest

SLOW = (
    "import time\n\n\ndef slow(prompts, responses, **_):\n    time.sleep(0.2)\n    return [len(r) for r in responses]\n"
)
HANGING = """
import os, time
from pathlib import Path

def hanging(prompts, responses, **_):
    if os.environ["RANK"] == "{rank}" and list(Path("here/checkpoints").glob("step-*")) and not Path("hung").exists():
        Path("hung").touch()
        {hang}
    return [len(r) for r in responses]
"""
"""A reward that hangs once, in a step after the first."""
COMMAND = [sys.executable, "-m", "cavesson"]


def arguments(folder: Path, **changes: object) -> list[str]:
    """Those of a tiny run of 40 steps of 0.2 seconds."""
    (folder / "prompts.txt").write_text("On the table\nMy\n")
    (folder / "slow.py").write_text(SLOW)
    flags: dict[str, object] = {"data.path": "prompts.txt", "steps": 40, "batch_size": 4, "model.device": "cpu"}
    flags |= {"rewards": '[{use = "slow.py:slow"}]', "checkpoint.every": 1, "run": "here", "processes": 2}
    flags |= {name.replace("__", "."): value for name, value in changes.items()}
    return ["ppo", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=300)


def begun(folder: Path) -> subprocess.Popen[str]:
    """A run whose first checkpoint is there."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *arguments(folder)], cwd=folder, text=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + 200
    while not list((folder / "here" / "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    return process  # type: ignore[no-any-return]


def worker(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    children = psutil.Process(launcher.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def said(errors: str) -> list[str]:
    """The lines of the command; others are warnings of libraries."""
    return [line for line in errors.splitlines() if line.startswith("cavesson: ")]


def goes_on(folder: Path, line: str, *flags: str) -> None:
    """The run ends after the command that a line tells, with more flags."""
    way = line.split("; continue with: ")[1]
    assert way.endswith(" --processes 2")
    done = latest(folder / "here")
    assert done is not None
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    words = [*shlex.split(way), "--steps", str(done.step + 1), *flags]
    resumed = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    run = cavesson.open(folder / "here")
    rows = run.rows(["step", "sample"]).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [(s, i) for s in range(done.step + 1) for i in range(4)]


def test_several_processes_train_one_run(tmp_path: Path) -> None:
    done = train(tmp_path, *arguments(tmp_path, steps=1))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("1 of 1 done") == 1  # said once, not by every process
    run = cavesson.open(tmp_path / "here")
    assert run.info["processes"] == 2 and run.rows()["sample"].to_pylist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    for changes in ({"batch_size": 1}, {"parallel.shard": "hybrid"}):
        done = train(tmp_path, *arguments(tmp_path, **changes))
        assert done.returncode == 2 and len(said(done.stderr)) == 1, done.stderr[-3000:]
        assert "Traceback" not in done.stderr and not (tmp_path / "here").exists()
    done = train(tmp_path, *arguments(tmp_path, processes=0))
    assert done.returncode == 2 and done.stderr == "cavesson: --processes 0: give at least 1\n"


@pytest.mark.slow
def test_a_mistake_of_another_process_is_told(tmp_path: Path) -> None:
    body = 'return [1 / (int(os.environ["RANK"]) - 1)] * len(prompts)'
    broken = f"import os\ndef broken(prompts, responses, **_):\n    {body}\n"
    (tmp_path / "broken.py").write_text(broken)
    done = train(tmp_path, *arguments(tmp_path, rewards='[{use = "broken.py:broken"}]'))
    *_, line = said(done.stderr)
    assert line.startswith("cavesson: process 1 of 2 (counted from 0) ended: ")
    assert "reward broken raised ZeroDivisionError" in line and "line 3" in line, done.stderr[-3000:]
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named_and_the_run_continues(tmp_path: Path, rank: int) -> None:
    process = begun(tmp_path)
    worker(process, rank).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    *_, line = said(errors)
    assert line.startswith(
        f"cavesson: process {rank} of 2 (counted from 0) was killed by SIGKILL; the others were ended"
    )
    assert process.returncode == 2 and "Traceback" not in errors, errors[-3000:]
    goes_on(tmp_path, line)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    process = begun(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors[-3000:]
    (line,) = said(errors)
    assert line.startswith("cavesson: interrupted ") and "the checkpoint is complete" in line
    goes_on(tmp_path, line)


def hung(folder: Path, rank: int, hang: str = "time.sleep(600)", timeout: int = 15) -> str:
    """Run until a process hangs, which must be said once; the line."""
    (folder / "hanging.py").write_text(HANGING.format(rank=rank, hang=hang))
    flags = arguments(folder, rewards='[{use = "hanging.py:hanging"}]', parallel__timeout=timeout)
    done = train(folder, *flags)
    taken = time.time() - (folder / "hung").stat().st_mtime
    (line,) = said(done.stderr)
    start = f'cavesson: process {rank} of 2 (counted from 0) has made no progress in "step '
    assert line.startswith(start) and ', reward" for 1' in line, line
    assert f"while the others wait (parallel.timeout is {timeout} s); continue with: " in line
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert timeout < taken < timeout + (15 if "kill" not in hang else 60)  # torchrun's agent gives them 30 seconds
    return line


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_is_named_and_the_run_continues(tmp_path: Path, rank: int) -> None:
    goes_on(tmp_path, hung(tmp_path, rank), "--parallel.timeout", "600")


@pytest.mark.slow
def test_a_stopped_process_is_named_and_ended(tmp_path: Path) -> None:
    stop = f"time.sleep(0.5); os.kill(os.getpid(), {signal.SIGSTOP:d})"
    goes_on(tmp_path, hung(tmp_path, 0, stop), "--parallel.timeout", "600")


@pytest.mark.slow
def test_the_processes_end_with_their_launcher(tmp_path: Path) -> None:
    process = begun(tmp_path)
    workers = [worker(process, rank) for rank in range(2)]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=10)
    for left in alive:
        left.kill()
    assert not alive


@pytest.mark.slow
def test_torchrun_starts_the_processes_itself(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    done = subprocess.run(
        [*launcher, "cavesson", *arguments(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "--processes has no effect under torchrun" in done.stderr
