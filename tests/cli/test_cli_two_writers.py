"""Two processes that would train in one folder: the second is told who the first is, and nothing is hidden."""

import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from cli_helpers import RECIPE, cavesson, end, start, write_recipe

from cavesson import open as open_run

STEPS = 40
LONG = RECIPE.replace("steps = 2", f"steps = {STEPS}") + "[checkpoint]\nevery = 2\n"


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    write_recipe(folder, LONG)
    return folder


def standing_still(folder: Path, *arguments: str, attempt: int = 0) -> BaseProcess:
    """A training that has begun and was stopped, as by Ctrl-Z."""
    process = start(folder, *arguments)
    record = folder / "run" / "record"
    deadline = time.monotonic() + 120
    while not list(record.glob(f"rows-*-{attempt:04d}-0000.parquet")):
        assert time.monotonic() < deadline and process.exitcode is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    return process


def check_whole(run: Path) -> None:
    keys = [(row["step"], row["sample"]) for row in open_run(run).rows(["step", "sample"]).to_pylist()]
    assert keys == [(step, sample) for step in range(STEPS) for sample in range(4)]


def elsewhere(folder: Path) -> Path:
    """Another working directory, since each keeps its own output."""
    other = folder.parent / "other"
    other.mkdir()
    write_recipe(other, LONG)
    return other


@pytest.mark.slow
def test_two_resumes(here: Path) -> None:
    killed = standing_still(here, "ppo", "recipe.toml")
    killed.kill()
    killed.join(60)
    first = standing_still(here, "ppo", "--resume", "run", attempt=1)  # after a kill the folder is nobody's
    try:
        second = cavesson(elsewhere(here), "ppo", "--resume", "../here/run")
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert second.code == 2 and len(second.err.splitlines()) == 1
    assert f"being written by process {first.pid} on " in second.err
    end(first)
    assert first.exitcode == 0
    check_whole(here / "run")
    assert not (here / "run" / "writer.json").exists()


@pytest.mark.slow
def test_two_starts(here: Path) -> None:
    """Both find the folder free; the one that comes to write second is refused."""
    first, second = (
        start(here, "ppo", "recipe.toml"),
        start(elsewhere(here), "ppo", "recipe.toml", "--run", "../here/run"),
    )
    end(first)
    end(second)
    codes = sorted([first.exitcode, second.exitcode])
    said = [(folder / ".err").read_text() for folder in (here, here.parent / "other")]
    assert codes == [0, 2], said
    assert sum("written by process" in text or "exists already" in text for text in said) == 1, said
    check_whole(here / "run")


def test_a_deleted_folder_ends_the_training(here: Path) -> None:
    for gone in ("", "record"):
        shutil.rmtree(here / "run", ignore_errors=True)
        process = standing_still(here, "ppo", "recipe.toml")
        shutil.rmtree(here / "run" / gone)
        os.kill(process.pid, signal.SIGCONT)
        end(process)
        err = (here / ".err").read_text()
        assert process.exitcode == 2, err
        assert err.splitlines()[-1] == f"cavesson: {Path('run') / gone} was deleted or moved while it was being written"
        steps = (here / ".out").read_text().count("reward")
        assert steps < STEPS - 5  # none at all where it was stopped before it printed the first
