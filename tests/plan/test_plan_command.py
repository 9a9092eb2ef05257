"""`cavesson plan`: what it prints, as text and as JSON, and mistakes in one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cavesson.cli import app
from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(RECIPES.parent)


@pytest.mark.slow
def test_the_json_of_a_plan() -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "tiny-sft.toml"), "--gpus", "2", "--gpu", "h200", "--json"])
    (plan,) = json.loads(done.stdout)
    assert (plan["command"], plan["gpu"], plan["gpus"], plan["fits"]) == ("sft", "h200", 2, True)
    assert sum(plan["memory"]["parts"].values()) == plan["memory"]["peak"]
    assert sum(plan["step"]["parts"].values()) == pytest.approx(plan["step"]["seconds"])
    assert plan["binds"]["memory"] in plan["memory"]["parts"]
    assert plan["binds"]["time"] in plan["step"]["parts"]
    assert 'parallel.shard = "full"' in plan["settings"]
    assert plan["limits"] == []


@pytest.mark.slow
def test_the_text_of_a_plan() -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "tiny-sft.toml"), "--gpu", "h200"])
    assert done.exit_code == 0
    text = " ".join(done.stdout.split())
    assert "plan of cavesson sft on 1 × h200" in text
    for title in ("Memory", "Step", "Bottlenecks", "Effect of other settings"):
        assert title in text


@pytest.mark.slow
def test_nothing_is_written_or_loaded(tmp_path: Path) -> None:
    """A model whose weights are not there can be planned."""
    tiny_model().config.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    words = ["--model.path", str(tmp_path / "model"), "--run", str(tmp_path / "run"), "--json"]
    words = ["plan", str(RECIPES / "tiny-sft.toml"), *words]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0
    assert json.loads(done.stdout)[0]["memory"]["peak"] > 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "gtx"], "--gpu gtx: unknown device; choose one of h100"),
        (["--gpus", "9"], "--gpus 9 does not fill hosts of 8"),
        (["--steps", "0"], "steps"),
    ],
)
def test_mistakes(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["plan", str(RECIPES / "tiny-sft.toml"), *words])
    assert isinstance(done.exception, UserError)
    assert message in str(done.exception)
