"""Temporary folders: removed at the end, kept as long as their process lives, and after a kill removed by the next."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cavesson.scratch import Scratch

HOLDS = """
import sys, time
from cavesson.scratch import Scratch
folder = Scratch("test")
open(folder.name + "/weights", "w").close()
print(folder.name, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextmanager
def holding(place: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """Another process with a folder."""
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen([sys.executable, "-c", HOLDS], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_goes_with_its_block_or_its_object(place: Path) -> None:
    with Scratch("test") as folder:
        (Path(folder.name) / "file").touch()
        assert list(place.iterdir()) == [Path(folder.name)]
    assert not list(place.iterdir())
    folder.cleanup()
    other = Scratch("test")
    assert list(place.iterdir())
    del other
    assert not list(place.iterdir())


def test_what_a_killed_process_leaves_is_removed_and_nothing_of_a_living_one(place: Path) -> None:
    with holding(place) as (dead, left), holding(place) as (_, living):
        assert (left / "weights").exists() and (living / "weights").exists()
        with Scratch("test"):
            assert left.exists() and living.exists()
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        with Scratch("other"):
            assert left.exists()  # of another kind
        with Scratch("test") as mine:
            assert not left.exists() and living.exists() and Path(mine.name).exists()


def test_what_only_looks_like_a_folder_is_left_alone(place: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    target = tmp_path_factory.mktemp("elsewhere")
    (target / "file").touch()
    (place / "cavesson-test-link").symlink_to(target)
    (place / "cavesson-test-file").touch()
    with Scratch("test"):
        pass
    assert (target / "file").exists() and len(list(place.iterdir())) == 2
