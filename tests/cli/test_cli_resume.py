"""A run that is killed, again and again, at any moment, becomes the run that was not."""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import cavesson, end, start, write_recipe

from cavesson import open as open_run

STEPS = 6
RECIPE = f"""
run = "run"
steps = {STEPS}
batch_size = 4
[model]
device = "cpu"
[model.lora]
rank = 2
[data]
path = "prompts.txt"
shuffle = true
[sampling]
random_length = [1, 5]
[[rewards]]
use = "rewards.py:noisy"
[shaping]
scale = true
normalise = true
[kl]
coef = 0.3
target = 0.05
horizon = 40
[update]
epochs = 2
mini_batches = 2
[optimizer]
learning_rate = 1e-2
schedule = "cosine"
warmup_steps = 2
[checkpoint]
every = 2
keep = 2
[doctor]
on_finding = "ignore"
"""
REWARDS = """
import random

import numpy as np
import torch


def noisy(prompts, responses, **columns):
    return [len(r) + random.random() + np.random.rand() + float(torch.rand(())) for r in responses]
"""


def prepare(folder: Path) -> Path:
    folder.mkdir()
    write_recipe(folder, RECIPE, prompts=("On the table", "My", "A dog and", "It", "Yesterday"))
    (folder / "rewards.py").write_text(REWARDS)
    return folder


class Whole:
    """The run that nobody interrupted."""

    def __init__(self, folder: Path) -> None:
        self.folder = prepare(folder)
        cavesson(self.folder, "--help")  # the first process is forked from one that must still import everything
        started = time.monotonic()
        done = cavesson(self.folder, "ppo", "recipe.toml")
        self.seconds = time.monotonic() - started
        assert done.code == 0, done.err
        self.operations = int((self.folder / ".operations").read_text())
        self.result = result(self.folder / "run")


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    own = ("time/", "machine/", "attempt", "tokens_per_second")
    return {name: value for name, value in metrics.items() if not name.startswith(own)}


def result(folder: Path) -> dict[str, Any]:
    """Everything that must be the same."""
    run = open_run(folder)
    return {
        "rows": run.rows().drop_columns("attempt").to_pylist(),
        "tokens": [run.tokens(step).to_pylist() for step in range(STEPS)],
        "metrics": [timeless(row) for row in run.steps().to_pylist()],
        "weights": {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")},
        "checkpoints": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted((folder / "checkpoints").glob("*/*.safetensors"))
        },
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole") / "here")


def test_the_run_without_a_kill_has_every_rollout_once(whole: Whole) -> None:
    rows = whole.result["rows"]
    assert [(row["step"], row["sample"]) for row in rows] == [(s, i) for s in range(STEPS) for i in range(4)]
    assert [row["step"] for row in whole.result["metrics"]] == list(range(STEPS))
    coefficients = [row["kl/coef"] for row in whole.result["metrics"]]
    assert len(set(coefficients)) == STEPS  # it adapts
    assert len({row["reward"] % 1 for row in rows}) == len(rows)  # the noise is there
    assert set(whole.result["checkpoints"]) == {
        f"checkpoints/step-0000000{step}/{name}.safetensors" for step in (4, 6) for name in ("optimizer", "weights")
    }


def again(folder: Path) -> tuple[str, ...]:
    """What a person types after a kill: go on, or start where nothing was begun."""
    if (folder / "run" / "run.json").exists():
        return ("ppo", "--resume", "run")
    return ("ppo", "recipe.toml")


def check_killed(folder: Path) -> None:
    """What a killed run leaves behind can be read, and what it holds is whole."""
    run = folder / "run"
    kept = [path for path in (run / "checkpoints").glob("step-*/*") if path.is_file()]
    assert {path.suffix for path in kept} <= {".safetensors", ".json"}
    if (run / "run.json").exists():
        rows = open_run(run).rows(["step", "sample", "length"]).to_pylist()
        keys = [(row["step"], row["sample"]) for row in rows]
        assert keys == [(step, i) for step in range(len(keys) // 4) for i in range(4)]
        for step in range(len(keys) // 4):
            assert open_run(run).tokens(step).num_rows == sum(row["length"] for row in rows if row["step"] == step)


def finish(folder: Path, whole: Whole) -> None:
    done = cavesson(folder, *again(folder))
    assert done.code == 0, done.err
    seen = result(folder / "run")
    for name, expected in whole.result.items():
        assert seen[name] == expected, name


# Fractions of the disk operations of a whole run; several mean that the resumed run is killed as well.
KILLS = [(0.0,), (0.02,), (0.07,), (0.3,), (0.37,), (0.62,), (0.98,), (0.2, 0.15, 0.4), (0.5, 0.01, 0.03, 0.3)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fractions", KILLS, ids=str)
def test_killed_between_two_disk_operations(whole: Whole, tmp_path: Path, fractions: tuple[float, ...]) -> None:
    folder = prepare(tmp_path / "here")
    for fraction in fractions:
        done = cavesson(folder, *again(folder), die_at=1 + int(fraction * whole.operations))
        assert done.code == -signal.SIGKILL
        check_killed(folder)
    finish(folder, whole)


@pytest.mark.slow
def test_killed_at_each_of_the_first_moments_it_gets_on(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    write_recipe(
        folder, RECIPE.replace('use = "rewards.py:noisy"', 'use = "lowercase"').replace("steps = 6", "steps = 1")
    )
    begun = []
    for operation in range(1, 10):  # run.json, the vocabulary, the attempt, and the first rollouts
        shutil.rmtree(folder / "run", ignore_errors=True)
        command = ["ppo", "recipe.toml", "--resume", "run"]  # a scheduler runs the same command again
        assert cavesson(folder, *command, die_at=operation).code == -signal.SIGKILL
        begun.append((folder / "run" / "run.json").exists())
        done = cavesson(folder, *command)
        assert done.code == 0, (operation, done.err)
        assert open_run(folder / "run").rows(["step"])["step"].to_pylist() == [0] * 4
    assert set(begun) == {False, True}


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_being_written(whole: Whole, tmp_path: Path) -> None:
    caught = 0
    for operation in range(1, whole.operations):
        folder = prepare(tmp_path / f"at {operation}")
        process = start(folder, "ppo", "recipe.toml", die_at=operation + whole.operations // 3)
        end(process)
        unfinished = list((folder / "run" / "checkpoints").glob(".step-*"))
        if unfinished:
            check_killed(folder)
            finish(folder, whole)
            assert not list((folder / "run" / "checkpoints").glob(".step-*"))  # and it was cleared away
            caught += 1
        if caught == 2:
            return
    pytest.fail("no kill met a checkpoint")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fraction", "begun"), [(0.0, False), (0.02, False), (0.1, False), (0.37, True), (0.45, True)])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    whole: Whole, tmp_path: Path, fraction: float, begun: bool
) -> None:
    folder = prepare(tmp_path / "here")
    done = cavesson(folder, "ppo", "recipe.toml", full_at=1 + int(fraction * whole.operations))
    assert done.code == 2 and done.err.startswith("cavesson: the disk is full") and len(done.err.splitlines()) == 1
    way = re.findall(r"; continue with: \S*cavesson (.*)\n", done.err)
    # Of a run that fails in its first step nothing is left: the same command starts it.
    assert way == (["ppo --resume run"] if begun else []) and (folder / "run").exists() == begun
    check_killed(folder)
    finish(folder, whole)


@pytest.mark.slow
def test_killed_at_random_moments(whole: Whole, tmp_path: Path) -> None:
    moments, folder = random.Random(0), prepare(tmp_path / "here")
    for _ in range(4):
        process = start(folder, *again(folder))
        time.sleep(moments.uniform(0.1, max(0.2, whole.seconds)))
        process.kill()
        process.join(60)
        check_killed(folder)
    finish(folder, whole)


def goes_on(run: Path) -> bool:
    """Whether a run has a checkpoint, and has recorded another step, which is in its journal."""
    journal = run / "record" / ".journal-0000-0000"
    return any(run.glob("checkpoints/step-????????")) and journal.exists() and journal.stat().st_size > 0


@pytest.mark.slow
def test_a_real_command_killed_from_outside(whole: Whole, tmp_path: Path) -> None:
    folder = prepare(tmp_path / "here")
    command = [sys.executable, "-c", "import cavesson.cli; cavesson.cli.main()", "ppo", "recipe.toml"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not goes_on(folder / "run") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(60) == -signal.SIGKILL
    check_killed(folder)
    done = cavesson(folder, "ppo", "--resume", "run")
    assert done.code == 0, done.err
    assert "step 2 " in done.out and "step 0 " not in done.out  # from the checkpoint, not from the beginning
    assert result(folder / "run") == whole.result


def test_a_finished_run_says_so_and_stays_as_it_is(whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(whole.folder, folder)
    done = cavesson(folder, "ppo", "--resume", "run")
    assert done.code == 0, done.err
    assert "complete" in done.out and "step 0 " not in done.out
    assert result(folder / "run") == whole.result
