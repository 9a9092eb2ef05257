"""`cavesson init`: every template runs as it is, and what it leaves as a comment is valid too."""

import re
from pathlib import Path

import pytest
from cli_helpers import cavesson

from cavesson import cli
from cavesson.align.recipe import read_recipe
from cavesson.cli.init import TEMPLATES
from cavesson.config import load
from cavesson.registry import ALGORITHMS


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algorithm", [kind for kind in TEMPLATES if kind in ALGORITHMS])
def test_a_template_trains_as_it_is(tmp_path: Path, algorithm: str) -> None:
    assert cavesson(tmp_path, "init", algorithm, "mine").code == 0
    done = cavesson(tmp_path / "mine", algorithm, "recipe.toml", "--steps", "2", "--model.device", "cpu")
    assert done.code == 0, done.err
    assert (tmp_path / "mine" / "runs" / algorithm / "model").is_dir()


@pytest.mark.parametrize("algorithm", [kind for kind in TEMPLATES if kind in ALGORITHMS])
def test_what_is_a_comment_is_valid_too(tmp_path: Path, algorithm: str) -> None:
    cavesson(tmp_path, "init", algorithm, "mine")
    recipe = tmp_path / "mine" / "recipe.toml"
    text = recipe.read_text(encoding="utf-8")
    assert "$" not in text
    plain = re.sub(r"^# (\[|\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert plain.count("\n# ") < text.count("\n# ")
    recipe.write_text(plain, encoding="utf-8")
    load(ALGORITHMS[algorithm].settings, recipe, [])


def test_an_agent_comes_with_its_tool_and_data(tmp_path: Path) -> None:
    """That it learns is a test of its recipe."""
    done = cavesson(tmp_path, "init", "agent", "mine")
    assert done.code == 0 and "cavesson align" in done.out.replace("\n", " ")
    stages = read_recipe(tmp_path / "mine" / "recipe.toml", [])
    assert [stage.name for stage in stages] == ["sft", "grpo", "compare"]
    template = Path(cli.__file__).parents[1] / "templates" / "agent"
    assert _contents(tmp_path / "mine") == _contents(template)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    done = cavesson(tmp_path, "init", "grpo")
    assert (done.code, done.err.strip()) == (2, "cavesson: reward.py exists; name another folder")
    assert (tmp_path / "reward.py").read_text() == "mine"
    assert not (tmp_path / "recipe.toml").exists()
    done = cavesson(tmp_path, "init", "gspo")
    assert (done.code, done.err.startswith("cavesson: unknown template 'gspo'; choose one of sft")) == (2, True)
