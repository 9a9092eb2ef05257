"""What supervises a vLLM server: it ends the server and what that has started, however the run ends."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from marked_processes import marked, survivors

from cavesson.rollout.engines import supervisor

# A server whose engine ignores SIGTERM, as one that is computing does.
SERVER = """
import signal, subprocess, sys, time
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    subprocess.Popen([sys.executable, "-c", open("server.py").read(), "engine"])
time.sleep(600)
"""
RUN = """
import os, subprocess, sys, time
from cavesson.rollout.engines import supervisor
command = [sys.executable, "-I", supervisor.__file__, str(os.getpid()), sys.executable, "server.py"]
subprocess.Popen(command, start_new_session=True)
print("started", flush=True)
time.sleep(600)
"""


def supervised(folder: Path, *command: str, **changes: object) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-I", supervisor.__file__, str(os.getpid()), sys.executable, *command]
    return subprocess.Popen(words, cwd=folder, start_new_session=True, **changes)  # type: ignore[call-overload, no-any-return]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_survives_a_run_that_is_killed_at_any_time(tmp_path: Path, number: int) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    for attempt in range(4):
        mark = f"{tmp_path}-{attempt}"
        environment = {**os.environ, "MARK": mark}
        with subprocess.Popen(
            [sys.executable, "-c", RUN], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == b"started\n"
            time.sleep(random.random() * 0.3 * attempt)
            process.send_signal(number)
        assert not survivors(mark, supervisor.PATIENCE + 10)


def test_a_server_that_is_asked_to_end_takes_its_engine_with_it(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    process = supervised(tmp_path, "server.py", env={**os.environ, "MARK": str(tmp_path)})
    deadline = time.monotonic() + 60
    while len(marked(str(tmp_path))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # until the engine ignores the signal
    process.terminate()
    assert process.wait(supervisor.PATIENCE + 10) == -signal.SIGKILL
    assert not survivors(str(tmp_path), 5)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("pass", 0),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", -signal.SIGABRT),
    ],
)
def test_the_end_of_the_command_is_that_of_the_supervisor(tmp_path: Path, command: str, code: int) -> None:
    assert supervised(tmp_path, "-c", command).wait(60) == code
