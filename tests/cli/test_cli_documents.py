"""The documentation and the recipes are those of this code."""

import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from cli_helpers import Done, cavesson, fresh
from typer.core import TyperGroup

from cavesson import open as open_run
from cavesson.cli import app
from cavesson.config import load
from cavesson.plan.recipe import planned
from cavesson.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TINY = sorted(ALGORITHMS)

HELD_OUT = ["--data.validation", "0.5", "--evaluation.every", "1"]
PAIRS = ["--data.path", "pairs.jsonl", "--steps", "2", *HELD_OUT]
SHAPING = ["--shaping.subtract_query", "true", "--shaping.scale", "true", "--shaping.missing_eos_penalty", "1"]
GROUPS = ["--samples_per_prompt", "2", "--kl.coef", "0.1"]
# Every setting on that adds a metric.
FLAGS = {
    "ppo": [
        *("--kl.target", "1", "--value.kind", "separate", "--kl.estimator", "full", "--ppo.entropy_coef", "0.1"),
        *("--update.target_policy_kl", "1", "--update.epochs", "2", "--update.mini_batches", "2", *SHAPING),
        *("--cleaning.discard", "too_short", "--cleaning.discard_reward", "-9", "--ppo.importance", "2"),
        *HELD_OUT,
    ],
    "grpo": [
        *GROUPS,
        *("--grpo.overlong", "penalty", "--grpo.overlong_buffer", "2", "--grpo.importance", "2"),
        *("--grpo.dual_clip", "3", "--grpo.off_policy_kl", "1"),
        *HELD_OUT,
    ],
    "rloo": [
        *GROUPS,
        *("--rloo.importance", "2", "--rloo.dual_clip", "3", "--rloo.off_policy_kl", "1"),
        *HELD_OUT,
    ],
    "raft": ["--raft.k", "2", "--reference.kind", "copy", *HELD_OUT],
    "distill": [
        *("--samples_per_prompt", "2", "--distill.loss_type", "full", "--distill.importance", "2"),
        *("--teacher.path", "tiny", "--reference.kind", "copy", *HELD_OUT),
    ],
    "sft": ["--data.columns.response", "chosen", *PAIRS],
    "reward-model": PAIRS,
    "dpo": PAIRS,
    "kto": PAIRS,
}


def _generic(name: str) -> str:
    """Parts of rewards are called as the user calls them."""
    return re.sub(r"^reward/part/.*", "reward/part/", name)


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """For each algorithm the names of all metrics of a run with everything on."""
    found = {}
    for name in TINY:
        folder = fresh(tmp_path_factory.mktemp("logged") / name)
        rows = [{"prompt": f"{n} and", "chosen": f" {n + 1}.", "rejected": " no"} for n in range(20)]
        (folder / "pairs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        recipe = [] if FLAGS[name][-len(PAIRS) :] == PAIRS else ["recipe.toml"]
        flags = ["--run", "run", "--model.device", "cpu", "--batch_size", "4", *FLAGS[name]]
        done = cavesson(folder, name, *recipe, *flags)
        assert done.code == 0, done.err
        found[name] = {_generic(n) for n in open_run(folder / "run").steps().column_names} - {"step", "attempt"}
    return found


@pytest.mark.parametrize("name", TINY)
def test_every_logged_metric_is_documented(logged: dict[str, set[str]], name: str) -> None:
    pages = [DOCS / page for page in (f"algorithms/{name}.md", "text-statistics.md", "held-out.md", "machine.md")]
    documented = re.findall(r"`([^`\n]+)`", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert len(logged[name]) > 15
    assert not logged[name] - {_generic(n) for n in documented}, "not documented"


@pytest.mark.parametrize("name", TINY)
def test_every_documented_metric_is_logged(logged: dict[str, set[str]], name: str) -> None:
    text = (DOCS / "algorithms" / f"{name}.md").read_text(encoding="utf-8")
    text = text.split("\n## Explanation of the logged metrics\n")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| `([a-z_]+/[a-z_0-9/<>]+)` \|", text, flags=re.MULTILINE)
    assert len(first_cells) > 8
    assert not {_generic(n) for n in first_cells} - logged[name], "not logged"


@pytest.mark.parametrize("name", ["ppo", "raft"])
def test_every_documented_metric_of_an_evaluation_is_logged(logged: dict[str, set[str]], name: str) -> None:
    text = (DOCS / "held-out.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {found for row in rows for found in re.findall("`([^`]+)`", row)}
    assert len(documented) == 10 and documented <= logged[name]


RECIPES = [*sorted((ROOT / "recipes").rglob("*.toml")), ROOT / "src" / "cavesson" / "demo" / "demo.toml"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recipe_is_valid(recipe: Path) -> None:
    known = [name for name in ALGORITHMS if name in recipe.stem]
    if any("model" in stage for stage in tomllib.loads(recipe.read_text()).values() if isinstance(stage, dict)):
        pytest.importorskip("cavesson.align.recipe").read_recipe(recipe, [])
        return
    settings = load(ALGORITHMS[known[0] if known else "ppo"].settings, recipe, [])
    assert settings != type(settings)()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TINY)
def test_every_algorithm_has_a_tiny_recipe_which_runs_from_the_repository(name: str, tmp_path: Path) -> None:
    """Two steps of it; that the whole of it learns in under a minute is what test_tiny_recipes.py says."""
    here = fresh(tmp_path / "here")
    (here / "recipes").symlink_to(ROOT / "recipes")
    flags = ["--steps", "2", "--batch_size", "8", "--run", "run", "--model.device", "cpu"]
    if name == "distill":
        assert cavesson(here, "sft", "recipes/tiny-sft.toml", "--steps", "2").code == 0  # the teacher
    done: Done = cavesson(here, name, f"recipes/tiny-{name}.toml", *flags)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1].startswith("result   ")
    assert open_run(here / "run").steps().num_rows >= 2


WRITTEN = [
    page for page in sorted(DOCS.rglob("*.md")) if page.relative_to(DOCS).parts[0] not in ("diagnosis", "reference")
]


def test_every_page_says_for_whom_it_is_and_is_in_the_index() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = {line for tree in re.findall(r"```{toctree}(.*?)```", index, re.DOTALL) for line in tree.splitlines()}
    assert len(WRITTEN) > 50
    for page in WRITTEN:
        title, first = page.read_text(encoding="utf-8").split("\n\n")[:2]
        assert title.startswith("# ") and first.startswith(("For ", "写给", "Dành cho ")), page.name
        assert str(page.relative_to(DOCS).with_suffix("")) in listed | {"index"}, page.name


TUTORIALS = sorted(page for page in (DOCS / "tutorials").glob("*.md") if "." not in page.stem)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
@pytest.mark.parametrize("language", ["zh", "vi"])
def test_a_tutorial_shows_the_same_code_in_every_language(page: Path, language: str) -> None:
    there = page.with_suffix(f".{language}.md").read_text(encoding="utf-8")
    assert _code(there.replace(f" --language {language}", "")) == _code(page.read_text(encoding="utf-8")) != []
    assert there.count("\n## ") == page.read_text(encoding="utf-8").count("\n## ")


def _code(page: str) -> list[str]:
    """The blocks of code, without comments."""
    return [re.sub(r" *#.*", "", block) for block in re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)]


README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join([*re.findall(r"```sh\n(.*?)```", README, re.DOTALL), *re.findall(r"`(cavesson [^`]+)`", README)])
COMMANDS = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^cavesson .*", SHELL, re.MULTILINE)]
"""Arguments of every `cavesson` that the README calls."""


def test_every_command_of_the_readme_exists() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    called = {words[0] for words in COMMANDS if not words[0].startswith("-")}
    assert len(called) > 10 and called <= group.commands.keys()


def test_every_command_of_the_readme_accepts_its_recipe(tmp_path: Path) -> None:
    (recipe,) = (block for block in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "[model]" in block)
    (tmp_path / "recipe.toml").write_text(recipe)
    accepted = []
    for name, *words in (words for words in COMMANDS if "recipe.toml" in words and words[0] != "data"):
        option = dict(pairwise(words)).get("--command")
        (run,) = planned(tmp_path / "recipe.toml", [], name if name in ALGORITHMS else option)
        accepted.append((name, run.command))
    assert {("check", "grpo"), ("plan", "grpo"), ("grpo", "grpo"), ("ppo", "ppo")} <= set(accepted)
