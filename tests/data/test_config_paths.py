"""Paths: of a recipe beside it, of a flag from the working directory, and always full ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cavesson.algorithms.dpo import DPORun
from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.data.chat import read_template
from cavesson.data.settings import SourceSettings
from cavesson.data.sources import read
from cavesson.errors import UserError
from cavesson.models.load import load_causal

RECIPE = """
[model]
path = "base"
[reference]
kind = "model"
path = "HuggingFaceTB/SmolLM2-135M"
[data]
path = "prompts.txt"
template = "chat.jinja"
[[rewards]]
use = "reward.py:polite"
[[rewards]]
use = "classifier"
options = { path = "../judge", label = "good" }
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with what it names, and a working directory elsewhere that has files of the same names."""
    for folder in ("project", "elsewhere"):
        (tmp_path / folder / "base").mkdir(parents=True)
        for name in ("prompts.txt", "reward.py", "chat.jinja"):
            (tmp_path / folder / name).write_text(folder)
    (tmp_path / "judge").mkdir()
    (tmp_path / "project" / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "project"


def test_in_python_a_path_may_be_a_path(project: Path) -> None:
    settings = PPORun(model={"path": project / "base"}, data={"path": Path("prompts.txt")})
    assert settings.model.path == str(project / "base")
    assert settings.data.path == str(project.parent / "elsewhere" / "prompts.txt")


def test_a_recipe_means_what_lies_beside_it(project: Path) -> None:
    settings = load(PPORun, Path("../project/recipe.toml"), [])
    assert settings.model.path == str(project / "base")
    assert settings.data.path == str(project / "prompts.txt")
    assert settings.data.template == str(project / "chat.jinja")
    assert [reward.use for reward in settings.rewards] == [f"{project / 'reward.py'}:polite", "classifier"]
    assert settings.rewards[1].options == {"path": str(project.parent / "judge"), "label": "good"}
    assert settings.reference.path == "HuggingFaceTB/SmolLM2-135M"  # nothing is called that here: a name of the Hub
    assert settings.run == Path("runs/run")  # what is written goes to the working directory


def test_what_is_not_beside_the_recipe_is_looked_for_in_the_working_directory(project: Path) -> None:
    (project / "prompts.txt").unlink()
    settings = load(PPORun, project / "recipe.toml", [])
    assert settings.data.path == str(project.parent / "elsewhere" / "prompts.txt")


def test_a_flag_means_the_working_directory(project: Path) -> None:
    flags = ["--data.path", "prompts.txt", "--rewards", '[{use = "reward.py:polite"}]', "--model.path", "./base"]
    settings = load(PPORun, project / "recipe.toml", flags)
    here = project.parent / "elsewhere"
    assert (settings.data.path, settings.model.path) == (str(here / "prompts.txt"), str(here / "base"))
    assert settings.rewards[0].use == f"{here / 'reward.py'}:polite"


def test_settings_in_python_mean_the_working_directory(project: Path) -> None:
    settings = PPORun.model_validate({"data": {"path": "prompts.txt"}})
    assert settings.data.path == str(project.parent / "elsewhere" / "prompts.txt")


def test_patterns_and_mixes_too(project: Path) -> None:
    (project / "rows").mkdir()
    (project / "rows" / "a.jsonl").touch()
    (project / "recipe.toml").write_text('[data]\nmix = [{ path = "rows/*.jsonl" }, { path = "owner/pairs" }]\n')
    first, second = load(DPORun, project / "recipe.toml", []).data.mix
    assert (first.path, second.path) == (str(project / "rows" / "*.jsonl"), "owner/pairs")


def test_built_in_names_are_no_folders(project: Path) -> None:
    (project / "tiny").mkdir()
    (project / "recipe.toml").write_text('model.path = "tiny"\n')
    assert load(PPORun, project / "recipe.toml", []).model.path == "tiny"


def test_a_template_may_be_the_text_itself(project: Path) -> None:
    template = "{% for message in messages %}" + "x" * 9000 + "{% endfor %}"
    (project / "recipe.toml").write_text(f"data.template = '{template}'\n")
    assert load(PPORun, project / "recipe.toml", []).data.template == template


def test_a_home_of_nobody_is_a_name_like_any_other(project: Path) -> None:
    name = "~nobody-of-this-name/base"
    (project / "recipe.toml").write_text(f'model.path = "{name}"\n')
    assert load(PPORun, project / "recipe.toml", []).model.path == name
    readers: dict[str, Callable[[], object]] = {
        f"there is no model folder {name}": lambda: load_causal(name),
        f"cannot read '{name}.jinja'": lambda: read_template(f"{name}.jinja"),
        f"{name}.jsonl: there is no such file": lambda: list(read(SourceSettings(path=f"{name}.jsonl"))),
    }
    for said, act in readers.items():
        with pytest.raises(UserError, match=said):
            act()
