"""`--processes N`: real processes that train, make mistakes, are killed and are interrupted."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cli_helpers
import psutil
import pytest
from account_helpers import account
from marked_processes import survivors

import cavesson
from cavesson.train.checkpoint import latest

SLOW = """
import os, signal, time
from pathlib import Path

def slow(prompts, responses, **_):
    time.sleep(0.2)
    if Path("sleep").exists() and Path("sleep").read_text() == os.environ["RANK"]:
        time.sleep(600)
    if Path("stop").exists() and Path("stop").read_text() == os.environ["RANK"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    return [len(r) for r in responses]
"""
"""A reward; the process whose number is in the file `sleep` or `stop` hangs in it."""
TIMEOUT = 20
PROMPTS = ("On the table", "My")
COMMAND = [sys.executable, "-m", "cavesson"]


def arguments(folder: Path, **changes: object) -> list[str]:
    """Those of a tiny run of 400 steps of 0.2 seconds."""
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "slow.py").write_text(SLOW)
    flags: dict[str, object] = {"data.path": "prompts.txt", "steps": 400, "batch_size": 4, "model.device": "cpu"}
    flags |= {"rewards": '[{use = "slow.py:slow"}]', "checkpoint.every": 1, "run": "here", "processes": 2, **changes}
    return ["ppo", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))]


def train(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Only the processes that it starts import everything anew."""
    done = cli_helpers.cavesson(folder, *words)
    return subprocess.CompletedProcess(words, done.code, done.out, done.err)


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A run, started by these words, or anew with these flags, that has written a checkpoint since then."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": environment()}
    anew = not words or words[0].startswith("--")
    command, before = (*COMMAND, *arguments(folder), *words) if anew else words, checkpoints(folder)
    process = subprocess.Popen(command, cwd=folder, text=True, **pipes)  # type: ignore[call-overload]
    deadline = time.monotonic() + 300
    while not checkpoints(folder) - before:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    return process  # type: ignore[no-any-return]


def environment() -> dict[str, str]:
    """In which the commands that are told can be pasted."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "here" / "checkpoints").glob("step-*")}


def worker(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    children = psutil.Process(launcher.pid).children()
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def said(errors: str) -> list[str]:
    """The lines of the command; others are warnings of libraries."""
    return [line for line in errors.splitlines() if line.startswith("cavesson: ")]


def killed(process: subprocess.Popen[str], rank: int) -> str:
    """What is said when one of the processes was killed."""
    worker(process, rank).send_signal(signal.SIGKILL)
    before = time.monotonic()
    _, errors = process.communicate(timeout=300)
    assert time.monotonic() - before < 60  # the other one does not wait for it
    assert process.returncode == 2 and "Traceback" not in errors, errors[-3000:]
    *_, line = said(errors)
    assert line.startswith(
        f"cavesson: process {rank} of 2 (counted from 0) was killed by SIGKILL; the others were ended"
    )
    return line


def interrupted(process: subprocess.Popen[str], number: int) -> str:
    """What is said after a signal."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + number, errors[-3000:]
    (line,) = said(errors)
    assert line.startswith("cavesson: interrupted ") and "the checkpoint is complete" in line
    return line


def hung(process: subprocess.Popen[str], how: tuple[str, int]) -> str:
    """What is said when one of the processes sleeps or is stopped."""
    (kind, rank), folder = how, Path(psutil.Process(process.pid).cwd())
    (folder / kind).write_text(str(rank))
    _, errors = process.communicate(timeout=300)
    (folder / kind).unlink()
    (line,) = said(errors)
    found = re.match(
        rf'cavesson: process {rank} of 2 \(counted from 0\) has made no progress in "step \d+, reward" for (\d+) s '
        rf"while the others wait \(parallel.timeout is {TIMEOUT} s\); continue with: ",
        line,
    )
    assert found and TIMEOUT <= int(found[1]) < 60, line
    assert process.returncode == 2 and "Traceback" not in errors, errors[-3000:]
    return line


@pytest.mark.slow
def test_several_processes_train_one_run(tmp_path: Path) -> None:
    done = train(tmp_path, *arguments(tmp_path, steps=1))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("1 of 1 done") == 1  # said once, not by every process
    run = cavesson.open(tmp_path / "here")
    assert run.info["processes"] == 2 and run.rows()["sample"].to_pylist() == [0, 1, 2, 3]


def starting(folder: Path, mark: str, number: int, delay: float) -> subprocess.Popen[str]:
    """A run that gets a signal soon after its first process has been started, while that imports its modules."""
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "env": environment() | {"MARK": mark}}
    process = subprocess.Popen([*COMMAND, *arguments(folder)], cwd=folder, text=True, **pipes)  # type: ignore[call-overload]
    deadline, this = time.monotonic() + 300, psutil.Process(process.pid)
    while not this.children():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(number)
    return process  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize("latest", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_no_process_survives_a_launcher_that_ends_while_they_start(tmp_path: Path, number: int, latest: float) -> None:
    process = starting(tmp_path, str(tmp_path), number, random.random() * latest)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0, errors[-3000:]
    assert not survivors(str(tmp_path), 20)


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
def test_what_ends_the_processes_is_told_and_the_run_continues(tmp_path: Path) -> None:
    """One run, ended and continued again and again: starting it takes longer than anything it does."""
    words, reached = ["--parallel.timeout", str(TIMEOUT)], [0]
    endings: list[tuple[Any, Any]] = [
        (killed, 0),
        (interrupted, signal.SIGINT),
        (interrupted, signal.SIGTERM),
        (hung, ("sleep", 1)),
        (hung, ("stop", 0)),
    ]
    for ending, argument in endings:
        line = ending(begun(tmp_path, *words), argument)
        words = shlex.split(line.split("; continue with: ")[1])
        assert words[-2:] == ["--processes", "2"]
        done = latest(tmp_path / "here")
        assert done is not None
        reached.append(done.step)
    last = train(tmp_path, *words[words.index("ppo") :], "--parallel.timeout", "600", "--steps", str(reached[-1] + 1))
    assert last.returncode == 0, last.stderr[-3000:]
    attempts = sorted((tmp_path / "here" / "attempts").iterdir())
    assert [json.loads(attempt.read_text())["start_step"] for attempt in attempts] == reached
    account(tmp_path / "here", PROMPTS, reached[-1] + 1)


@pytest.mark.slow
def test_the_processes_end_with_their_launcher(tmp_path: Path) -> None:
    process = begun(tmp_path)
    workers = [worker(process, rank) for rank in range(2)]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    for left in alive:
        left.kill()
    assert not alive


@pytest.mark.slow
def test_torchrun_starts_the_processes_itself(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "--"]
    done = subprocess.run(
        [*launcher, "cavesson", *arguments(tmp_path)], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and "--processes has no effect under torchrun" in done.stderr
