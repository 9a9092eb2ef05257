"""What the command sets in its own process; libgomp itself says what it has read."""

import gc
import json
import os
import subprocess
import sys
from io import TextIOWrapper
from pathlib import Path

import pytest
import torch
from cli_helpers import cavesson, fresh

from cavesson.cli.environment import OBJECTS, prepare
from cavesson.record import Recorder, begin_attempt, write_run

LIBGOMP = next((Path(torch.__file__).parent / "lib").glob("libgomp*"), None)
LOADED = "import ctypes, sys; from cavesson.cli.environment import prepare; prepare(); ctypes.CDLL(sys.argv[1])"
bundled = pytest.mark.skipif(LIBGOMP is None, reason="this build of PyTorch does not include libgomp")


def spins(*command: str, **variables: str) -> str:
    """How often a thread looks before it sleeps, by libgomp's own account in a process of `command`."""
    known = {name: text for name, text in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = known | variables | {"OMP_DISPLAY_ENV": "verbose"}
    ended = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in ended.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    return line.split("'")[1]


@pytest.mark.slow
@bundled
def test_waiting_threads_sleep_soon() -> None:
    assert spins("-m", "cavesson", "sft", "--help") == "1000"
    assert spins("-c", LOADED, str(LIBGOMP)) == "1000"


@bundled
def test_what_the_user_has_set_stays() -> None:
    assert spins("-c", LOADED, str(LIBGOMP), GOMP_SPINCOUNT="77") == "77"
    active = spins("-c", LOADED, str(LIBGOMP), OMP_WAIT_POLICY="active")
    assert active == spins("-c", LOADED.replace("prepare();", ""), str(LIBGOMP), OMP_WAIT_POLICY="active") != "1000"


def test_cycles_are_looked_for_less_often_and_still_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    before = gc.get_threshold()
    try:
        prepare()
        assert gc.isenabled()
        assert gc.get_threshold() == (OBJECTS, *before[1:])
    finally:
        gc.set_threshold(*before)


def written(encoding: str, *arguments: str | Path) -> bytes:
    """What `cavesson ARGUMENTS` writes into a pipe with this encoding."""
    command = [sys.executable, "-m", "cavesson", *map(str, arguments)]
    environment = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "200"}
    ended = subprocess.run(command, env=environment, capture_output=True)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encodings") / "run"
    write_run(folder, {"algorithm": "ppo"})
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        recorder.rollouts(0, {"sample": [0], "prompt": ["Phố"], "response": ["鱼\ufffdé"], "reward": [1.0]})
    return folder


@pytest.mark.sampled(1)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk"])
def test_an_encoding_without_a_character_shows_a_question_mark(run: Path, encoding: str) -> None:
    expected = {"ascii": "???", "latin-1": "??é", "gbk": "鱼?é"}[encoding]
    assert expected in written(encoding, "show", run).decode(encoding)


def test_the_help_is_shown_in_every_encoding() -> None:
    """It has '…' and tables of lines, which ASCII lacks."""
    assert "reward-model" in written("ascii", "--help").decode("ascii")


@pytest.mark.slow
def test_programs_read_utf8_whatever_the_encoding_of_the_system(run: Path) -> None:
    query = ["sql", run, "select prompt, response from rows"]
    assert json.loads(written("latin-1", *query, "--json")) == [{"prompt": "Phố", "response": "鱼\ufffdé"}]
    assert written("ascii", *query, "--csv").decode() == '"prompt","response"\n"Phố","鱼\ufffdé"\n'


def in_ascii() -> None:
    assert isinstance(sys.stdout, TextIOWrapper)
    sys.stdout.reconfigure(encoding="ascii", errors="strict")


def test_a_run_ends_in_an_encoding_that_its_lines_do_not_fit(tmp_path: Path) -> None:
    """Among what it prints are β and the arrow of its result."""
    folder = fresh(tmp_path / "run")
    done = cavesson(folder, "ppo", "recipe.toml", before=in_ascii)
    assert done.code == 0, done.err
    assert "mean reward of a step" in done.out.splitlines()[-1] and "?" in done.out
