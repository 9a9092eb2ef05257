"""The documentation and the recipes are those of this code."""

import re
from pathlib import Path

import pytest
from cli_helpers import RECIPE, dressage, fresh

from dressage.algorithms.ppo import PPORun
from dressage.config import load
from dressage.record import open_run

ROOT = Path(__file__).parents[2]
RECIPES = [*sorted((ROOT / "recipes").glob("*.toml")), ROOT / "src" / "dressage" / "demo" / "demo.toml"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all metrics of a run with everything on."""
    folder = fresh(tmp_path_factory.mktemp("logged") / "here")
    flags = [
        "--kl.target",
        "1",
        "--value.kind",
        "separate",
        "--shaping.subtract_query",
        "true",
        "--shaping.scale",
        "true",
    ]
    flags += ["--shaping.missing_eos_penalty", "1", "--update.target_policy_kl", "1", "--kl.estimator", "full"]
    flags += ["--update.epochs", "2", "--update.mini_batches", "2", "--ppo.entropy_coef", "0.1"]
    done = dressage(folder, "ppo", "recipe.toml", *flags)
    assert done.code == 0, done.err
    columns = set(open_run(folder / "run").steps().column_names) - {"step", "attempt"}
    return {re.sub(r"^reward/part/.*", "reward/part/", name) for name in columns}


def test_every_logged_metric_is_documented(logged: set[str]) -> None:
    documented = re.findall(r"`([^`\n]+)`", (ROOT / "docs" / "algorithms" / "ppo.md").read_text(encoding="utf-8"))
    names = {re.sub(r"^reward/part/.*", "reward/part/", name) for name in documented}
    assert len(logged) > 40
    assert not logged - names, "not documented"


def test_every_documented_metric_is_logged(logged: set[str]) -> None:
    text = (ROOT / "docs" / "algorithms" / "ppo.md").read_text(encoding="utf-8")
    text = text.split("\n## Explanation of the logged metrics\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| `([a-z_]+/[a-z_0-9/<>]+)` \|", text, flags=re.MULTILINE)
    named = {re.sub(r"^reward/part/.*", "reward/part/", name) for name in first_cells}
    assert len(named) > 30
    assert not named - logged, "not logged"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe: Path) -> None:
    settings = load(PPORun, recipe, [])
    assert settings.rewards


def test_the_tiny_recipe_runs_from_the_repository(tmp_path: Path) -> None:
    assert 'path = "prompts.txt"' in RECIPE  # relative to where the command runs
    run = tmp_path / "run"
    flags = ["--steps", "1", "--batch_size", "2", "--run", str(run), "--model.device", "cpu"]
    here = fresh(tmp_path / "here")
    (here / "recipes").symlink_to(ROOT / "recipes")
    done = dressage(here, "ppo", "recipes/tiny-ppo.toml", *flags)
    assert done.code == 0, done.err
    assert open_run(run).rows().num_rows == 2
