"""The main commands write nothing to stderr: no warning of a library reaches users, who could do nothing about it.

Each is a new process, because some libraries warn when they are imported.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import fresh

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = ("--steps", "2", "--batch_size", "8", "--model.device", "cpu")
SCRIPT = """
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(output_dir="out", beta=0.04)
GRPOTrainer(model="Qwen/Qwen3-0.6B", reward_funcs=len, args=args).train()
"""


def stderr(folder: Path, *arguments: str) -> str:
    """What a command wrote to stderr; it must succeed."""
    command = [sys.executable, "-m", "cavesson", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and its finished run."""
    place = fresh(tmp_path_factory.mktemp("quiet") / "here")
    assert stderr(place, "grpo", "recipe.toml", "--samples_per_prompt", "2") == ""
    return place


READING = [["doctor", "run"], ["show", "run"], ["show", "run", "--step", "0", "--sample", "1"],
    ["sql", "run", "SELECT step, avg(reward) FROM rows GROUP BY step"], ["export", "run", "out", "--format", "parquet"],
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", READING, ids=lambda words: " ".join(words[:3]))
def test_reading_a_run(folder: Path, words: list[str]) -> None:
    assert stderr(folder, *words) == ""


def test_writing_recipes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    assert stderr(tmp_path, "init", "grpo", "mine") == ""
    assert stderr(tmp_path, "from-trl", "train.py", "mine.toml") == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward-model", "dpo", "ppo"])
def test_training(tmp_path: Path, name: str) -> None:
    assert stderr(tmp_path, name, str(RECIPES / f"tiny-{name}.toml"), "--run", "run", *SHORT) == ""


@pytest.mark.slow
def test_looking_ahead(folder: Path) -> None:
    assert stderr(folder, "check", "recipe.toml", "--command", "grpo", "--run", "other") == ""
