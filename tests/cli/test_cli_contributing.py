"""The algorithm that CONTRIBUTING.md adds in one file and one line is taken out of it and trained."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cavesson import open as open_run

ROOT = Path(__file__).parents[2]
# What a line in the table and a file beside it do, without writing into the package; then commands, one a line.
ADDED = """
import sys
import cavesson.algorithms
from cavesson.registry import ALGORITHMS, Entry
cavesson.algorithms.__path__.append(sys.argv[1])
ALGORITHMS.update(eval("{" + sys.argv[2] + "}"))
from cavesson import cli
for line in sys.stdin:
    print("=====", flush=True)
    sys.argv = ["cavesson", *line.split()]
    try:
        cli.main()
    except SystemExit as stop:
        assert not stop.code, line
"""


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("\n## Add an algorithm\n")[1]
    return re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], flags=re.DOTALL)


@pytest.mark.slow
def test_the_worked_example_trains_resumes_and_explains_itself(blocks: list[str], tmp_path: Path) -> None:
    page, line = blocks
    (tmp_path / "reinforce.py").write_text(page, encoding="utf-8")
    run = tmp_path / "run"
    flags = f"--steps 40 --run {run} --model.device cpu --update.epochs 1 --doctor.on_finding ignore"
    commands = [f"recipes/tiny-grpo.toml {flags}", f"--resume {run}", "--help reinforce"]
    done = subprocess.run(
        [sys.executable, "-c", ADDED, str(tmp_path), line],
        input="".join(f"reinforce {command}\n" for command in commands),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, _, resumed, explained = done.stdout.split("=====\n")
    rewards = open_run(run).steps()["reward/mean"].to_pylist()
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5
    assert "is complete" in resumed
    assert "--reinforce.entropy_coef" in explained


def test_the_worked_example_is_in_the_style_of_the_house(blocks: list[str], tmp_path: Path) -> None:
    page = tmp_path / "reinforce.py"
    page.write_text(blocks[0], encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
