"""`make` installs when what it was given changes, and only then."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# It stands for a Python, and for pip and the Python of the environments that it makes: it writes down how it is called.
PYTHON = """#!/bin/sh
echo "$(basename "$0") $*" >> log
if [ "$1 $2" = "-m venv" ]; then
  for folder; do true; done
  [ "$3" != --clear ] || rm -rf "$folder"
  mkdir -p "$folder/bin"
  cp "$0" "$folder/bin/pip"
  cp "$0" "$folder/bin/python"
fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt", "older.txt"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "older.txt", (0, 0))
    for name in ("python3", "python3.12"):
        (tmp_path / name).write_text(PYTHON)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def installs(project: Path, *variables: str, target: str = ".venv/.installed") -> str:
    """What `make` has called."""
    log = project / "log"
    log.unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{project}:{os.environ['PATH']}", "MAKEFLAGS": ""}
    subprocess.run(["make", target, *variables], cwd=project, env=environment, check=True, capture_output=True)
    return log.read_text() if log.exists() else ""


def test_make_installs_only_what_has_changed(project: Path) -> None:
    first = installs(project)
    assert "python3 -m venv --clear .venv\n" in first and "--constraint constraints.txt --editable" in first
    assert installs(project) == ""
    os.utime(project / "pyproject.toml", (2e9, 2e9))
    assert "venv" not in (again := installs(project)).replace(".venv", "") and "--editable" in again
    os.utime(project / "pyproject.toml", (0, 0))
    assert installs(project) == ""


def test_make_takes_other_constraints_even_if_their_file_is_older(project: Path) -> None:
    installs(project)
    assert "--constraint older.txt --editable" in installs(project, "CONSTRAINTS=older.txt")
    assert installs(project, "CONSTRAINTS=older.txt") == ""
    assert "--constraint constraints.txt --editable" in installs(project)


@pytest.mark.parametrize("target", [".venv/.installed", ".venv-vllm/.installed"])
def test_another_python_gets_a_new_environment(project: Path, target: str) -> None:
    installs(project, target=target)
    folder = target.split("/")[0]
    (project / folder / "old").touch()
    other = installs(project, "PYTHON=python3.12", target=target)
    assert f"python3.12 -m venv --clear {folder}\n" in other and "pip install" in other
    assert not (project / folder / "old").exists()
    assert installs(project, "PYTHON=python3.12", target=target) == ""
