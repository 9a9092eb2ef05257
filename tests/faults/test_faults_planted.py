"""The doctor names faults planted in real training, and is silent on healthy runs: a part of benchmarks/faults."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.faults import generate, world
from benchmarks.faults.case import Case
from benchmarks.faults.generate import make
from benchmarks.faults.planted import FAULTS
from benchmarks.faults.results import result_of
from benchmarks.faults.setup import train
from cavesson.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model that speaks the grammar well enough."""
    place = tmp_path_factory.mktemp("faults")
    size = world.SIZES["small"]
    model = world.train_base(size, 0, steps=120)
    model.save_pretrained(place / "base-small-0")
    world.tokenizer().save_pretrained(place / "base-small-0")
    world.train_critic(model, 0, steps=40).save_pretrained(place / "base-small-0" / "critic")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm"),
    [("top-k", "grpo"), ("penalty-flipped", "ppo"), ("likes-hash", "rloo"), ("engine-stale", "grpo")],
)
def test_a_planted_fault_is_named(name: str, algorithm: str, folder: Path) -> None:
    case = Case(name, 2, algorithm, "small", 0)
    make(case, folder)
    assert not (folder / case.folder / "failed.txt").exists()
    found, _ = result_of(folder / case.folder)
    assert found.named[0] in FAULTS[name].causes


@pytest.mark.slow
@pytest.mark.parametrize(("name", "algorithm"), [("usual", "ppo"), ("evaluated", "grpo"), ("resumed", "rloo")])
def test_a_healthy_run_has_no_finding(name: str, algorithm: str, folder: Path) -> None:
    case = Case(name, -1, algorithm, "small", 0)
    make(case, folder)
    assert not (folder / case.folder / "failed.txt").exists()
    found, _ = result_of(folder / case.folder)
    assert found.named == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_planted(name: str, folder: Path, tmp_path: Path) -> None:
    """What a fault replaces is where the fault expects it; a fault may end its run, but only in plain words."""
    setup = generate.planted(Case(name, 2, FAULTS[name].algorithms[-1], "small", 0), folder)
    setup.steps = 6 if setup.before_step else 2
    with suppress(UserError):
        train(setup, tmp_path / "run")
    assert (tmp_path / "run" / "run.json").exists()


@pytest.mark.slow
def test_a_fault_that_begins_late_is_named_with_its_beginning(folder: Path) -> None:
    case = Case("penalty-flipped", 2, "ppo", "small", 0, onset=22)
    make(case, folder)
    assert not (folder / case.folder / "failed.txt").exists()
    found, _ = result_of(folder / case.folder)
    assert found.steps == 48 and found.named[0] == "penalty-wrong"
    assert found.since is not None and abs(found.since - 22) <= 1
    assert found.between is not None and found.between[0] <= 22 <= found.between[1]


def test_all_runs_are_different_and_every_fault_is_planted_at_three_levels() -> None:
    cases = list(generate.cases(seeds=5))
    assert len({case.folder for case in cases}) == len(cases)
    one_each = {(case.name, case.level, case.seed) for case in cases if case.size == "small" and len(case.faults) == 1}
    assert one_each == {(name, level, seed) for name in FAULTS for level in range(3) for seed in range(5)}


def test_a_time_in_which_the_machine_stood_still_is_noticed() -> None:
    """One call that lets no other thread run, as if the whole process had been frozen."""
    with generate.still(most=0.3) as stills:
        time.sleep(0.3)
        sum(range(60_000_000))
    assert stills


STOPPED = """
import signal
import sys
from pathlib import Path
from benchmarks.faults.case import Case
from benchmarks.faults.generate import make_all
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a script starts in the background
cases = [Case("usual", -1, name, "small", seed) for seed in range(3) for name in ("ppo", "grpo")]
make_all(cases, Path(sys.argv[1]), processes=2)
"""


@pytest.mark.slow
def test_a_run_that_is_interrupted_does_not_count_as_a_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "base-small-0").symlink_to(folder / "base-small-0")
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    with subprocess.Popen(command, start_new_session=True) as process:
        deadline = time.monotonic() + 300
        while not any(tmp_path.glob("*.part/record")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        process.wait(timeout=300)
    assert process.returncode
    assert not list(tmp_path.glob("*/case.json"))
