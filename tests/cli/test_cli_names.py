"""What a shell and a Python prompt complete, and the version."""

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import cavesson
from cavesson.registry import ALGORITHMS

SCRIPT = Path(sys.executable).with_name("cavesson")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_is_that_of_the_installed_package() -> None:
    version = importlib.metadata.version("cavesson")
    assert cavesson.__version__ == version
    done = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cavesson {version}\n", "")


def _classes(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from _classes(field.annotation)
    for inner in get_args(annotation):
        yield from _classes(inner)


@pytest.mark.slow
def test_a_python_prompt_completes_every_settings_class_and_what_a_user_calls() -> None:
    """As the prompt does it, with Python's own completer."""
    needed = {found.__name__ for entry in ALGORITHMS.values() for found in _classes(entry.settings)}
    needed |= {"open", "Recorder", "Training", "Result", "Run", "Rollout", "Reward", "UserError"}
    code = """
import rlcompleter
import cavesson
completer, n = rlcompleter.Completer({"cavesson": cavesson}), 0
while (match := completer.complete("cavesson.", n)) is not None:
    print(match.removeprefix("cavesson.").split("(")[0])
    n += 1
"""
    offered = set(python(code).split())
    assert not needed - offered, "add these to cavesson/__init__.py"
    assert offered == set(cavesson.__all__) - {"__version__"}


def test_nothing_but_public_names_is_offered() -> None:
    """Neither what the package imports for itself, nor modules that were imported since."""
    assert python("import cavesson, cavesson.record.read.reader; print(*dir(cavesson))").split() == sorted(
        cavesson.__all__
    )


@pytest.mark.parametrize("name", sorted(set(cavesson.__all__) - {"__version__"}))
def test_every_public_name_is_what_it_says(name: str) -> None:
    found = getattr(cavesson, name)
    assert found.__name__ == name and found.__module__.startswith("cavesson.")


def test_without_torch_the_prompt_still_completes_what_reading_needs() -> None:
    code = """
import importlib.machinery, sys

class Nothing(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in ("torch", "transformers") else super().find_spec(name, path, target)

sys.meta_path[-1] = Nothing
import rlcompleter
import cavesson
completer = rlcompleter.Completer({"cavesson": cavesson})
print(completer.complete("cavesson.o", 0), completer.complete("cavesson.Rec", 0), completer.complete("cavesson.PPO", 0))
print(*dir(cavesson))
print("torch" in sys.modules)
"""
    seen = (
        "cavesson.open( cavesson.Recorder( None\nRecorder Rollout Run RunAnalysis UserError __version__ open\nFalse\n"
    )
    assert python(code) == seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("typed", "completed"),
    [("cavesson gene", ["generate"]), ("cavesson data l", ["lengths"]), ("cavesson show --st", ["--step"])],
)
def test_bash_completes(typed: str, completed: list[str]) -> None:
    """The script that is installed, in a real bash."""
    script = subprocess.run(
        [SCRIPT, "--show-completion", "bash"],
        capture_output=True,
        text=True,
        env=os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
    ).stdout
    assert "complete" in script
    words = typed.split()
    ask = f"COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _cavesson_completion cavesson; echo ${{COMPREPLY[@]}}"
    environment = os.environ | {"PATH": f"{SCRIPT.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == completed, done.stderr
