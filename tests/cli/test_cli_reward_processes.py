"""Runs whose rewards use processes, or end in ways that are not exceptions of programs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import RECIPE, cavesson, write_recipe

import cavesson as library

POOL = """
import multiprocessing, signal, time
from pathlib import Path

def length(text):
    return float(len(text))

def pooled(prompts, responses, **columns):
    sleeping = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    sleeping.start()
    sleeping.terminate()
    sleeping.join()
    assert sleeping.exitcode == -signal.SIGTERM
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(length, responses)
"""

FAILING = """
import asyncio
from pathlib import Path

class Silent(Exception):
    def __str__(self):
        raise RuntimeError

def failing(prompts, responses, **columns):
    calls = Path(__file__).with_name("calls")
    calls.write_text(calls.read_text() + "." if calls.exists() else ".")
    if len(calls.read_text()) == 3:  # after the rehearsal and the first step
        raise {error}
    return [float(len(text)) for text in responses]
"""


def write(folder: Path, name: str, text: str) -> None:
    (folder / "mine.py").write_text(text)
    write_recipe(folder, RECIPE.replace('"lowercase"', f'"mine.py:{name}"') + "[checkpoint]\nevery = 0\n")


@pytest.mark.slow
def test_a_reward_may_use_a_pool_and_terminate_processes(tmp_path: Path) -> None:
    write(tmp_path, "pooled", POOL)
    # Not by `cavesson`, whose processes a server forks that has threads.
    command = [sys.executable, "-m", "cavesson", "ppo", "recipe.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = library.open(tmp_path / "run").rows()
    assert rows["reward"].to_pylist() == [float(len(text)) for text in rows["response"].to_pylist()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", ["asyncio.CancelledError", "KeyboardInterrupt", "Silent"])
def test_whatever_a_reward_raises_loses_no_step(tmp_path: Path, error: str) -> None:
    write(tmp_path, "failing", FAILING.format(error=error))
    done = cavesson(tmp_path, "ppo", "recipe.toml")
    name = error.rpartition(".")[2]
    assert done.code == 2 and "Traceback" not in done.err
    assert f"the reward failing raised {name} ({tmp_path}/mine.py, line 13)" in done.err
    assert re.search(r"the steps before step 1 are recorded; continue with: \S*cavesson ppo --resume", done.err)
    assert sorted((tmp_path / "run" / "checkpoints").iterdir())
    again = cavesson(tmp_path, "ppo", "--resume", "run")
    assert again.code == 0, again.err
