"""What the command sets in its own process; libgomp itself says what it has read."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cavesson.cli.environment import OBJECTS, prepare

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
