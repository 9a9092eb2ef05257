"""A run keeps the matrix products that it has chosen, whatever its machine chooses later."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from train_helpers import PROMPTS, everything, farthest, quiet, settings, tiny_flags, uneven, weights

from cavesson.errors import UserError
from cavesson.models.tiny import tiny_model, tiny_tokenizer
from cavesson.ops.matmul import HAS_ONEDNN
from cavesson.train.matmul import choices_of
from cavesson.train.run import Result, Training

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from cli_helpers import cavesson

pytestmark = pytest.mark.skipif(not HAS_ONEDNN, reason="there is only one product")
OTHER = {"onednn": "pytorch", "pytorch": "onednn"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a machine that has timed nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def use_cache(place: Path) -> None:
    """Give this forked process a separate cache; its parent keeps the one that all tests share."""
    os.environ["XDG_CACHE_HOME"] = str(place)


def built(folder: Path, steps: int, resume: bool = False) -> Training:
    """A run of a model with layers that are large enough for a choice."""
    made: dict[str, Any] = {"model": tiny_model(hidden=256), "tokenizer": tiny_tokenizer()}
    return Training(settings(folder, steps=steps), prompts=PROMPTS, rewards=uneven, resume=resume, **made)


def finished(folder: Path, steps: int, resume: bool = False) -> Result:
    return built(folder, steps, resume).run(quiet)


def choices(cache: Path) -> list[Path]:
    """The files with what a machine has chosen."""
    found = [file for file in (cache / "cavesson" / "products").rglob("*") if file.is_file()]
    assert found
    return found


def change_minds(cache: Path) -> None:
    """The machine chooses the other product of each shape from now on."""
    for file in choices(cache):
        file.write_text(OTHER[file.read_text()])


def kept(folder: Path) -> dict[str, str]:
    choices: dict[str, str] = json.loads((folder / "products.json").read_text())
    return choices


@pytest.mark.slow
def test_a_resumed_run_uses_its_products_although_the_machine_would_choose_the_others(
    cache: Path, tmp_path: Path
) -> None:
    whole = finished(tmp_path / "whole", 4)
    assert {name.split("-")[0] for name in kept(tmp_path / "whole")} == {"forward", "input", "weight"}
    finished(tmp_path / "run", 2)
    before = kept(tmp_path / "run")
    change_minds(cache)
    done = finished(tmp_path / "run", 4, resume=True)
    assert farthest(weights(whole.policy), weights(done.policy)) == 0.0
    metrics, rows = ([everything(tmp_path / name)[part] for name in ("whole", "run")] for part in ("metrics", "rows"))
    assert metrics[0] == metrics[1] and rows[0] == rows[1]
    assert before.items() <= kept(tmp_path / "run").items()
    # The choices do make a difference.
    other = finished(tmp_path / "other", 4)
    assert farthest(weights(whole.policy), weights(other.policy)) > 0.0
    assert all(kept(tmp_path / "other")[name] == OTHER[choice] for name, choice in before.items())


def test_equal_seeds_give_equal_runs(cache: Path, tmp_path: Path) -> None:
    first, second = (finished(tmp_path / name, 2) for name in ("first", "second"))
    assert farthest(weights(first.policy), weights(second.policy)) == 0.0
    assert kept(tmp_path / "first") == kept(tmp_path / "second")


def test_choices_before_the_first_step_are_kept_and_a_run_that_is_only_built_keeps_nothing(
    cache: Path, tmp_path: Path
) -> None:
    training = built(tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()
    early = {file.name for file in choices(cache)}
    training.run(quiet)
    assert early and early <= kept(tmp_path / "run").keys()


def test_each_process_has_choices_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "products.json").write_text('{"forward-16-576-576-2": "onednn"}')
    (tmp_path / "products-00001.json").write_text('{"forward-16-576-576-2": "pytorch"}')
    assert [list(choices_of(tmp_path, rank).known.values()) for rank in range(3)] == [
        ["onednn"], ["pytorch"], ["onednn"]  # the third process is new
    ]  # fmt: skip
    assert choices_of(tmp_path / "new", 0).known == {}


def test_damaged_choices_are_not_ignored(tmp_path: Path) -> None:
    finished(tmp_path / "run", 1)
    (tmp_path / "run" / "products.json").write_text("{")
    with pytest.raises(UserError, match=r"products\.json is damaged: put back a copy, or remove it to choose again"):
        finished(tmp_path / "run", 2, resume=True)
    (tmp_path / "run" / "products.json").unlink()
    finished(tmp_path / "run", 2, resume=True)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, read_only: Path) -> None:
    done = cavesson(tmp_path, "ppo", *tiny_flags("ppo", tmp_path / "run"), before=partial(use_cache, read_only))
    assert done.code == 0, done.err
    assert "the choice of matrix products cannot be kept on this machine ([Errno 30] Read-only file system" in done.out
    assert kept(tmp_path / "run")


@pytest.mark.slow
def test_several_processes_resume_with_their_products(tmp_path: Path) -> None:
    cache = tmp_path / "cache"

    def run(*arguments: str) -> None:
        done = cavesson(tmp_path, "ppo", "--processes", "2", *arguments, before=partial(use_cache, cache))
        assert done.code == 0, done.err

    for name, steps in (("whole", 3), ("run", 2)):
        run(*tiny_flags("ppo", tmp_path / name, steps=steps))
    assert (tmp_path / "run" / "products-00001.json").exists()
    change_minds(cache)
    run("--resume", "run", "--steps", "3")
    whole, resumed = everything(tmp_path / "whole"), everything(tmp_path / "run")
    assert whole["files"]["model/model.safetensors"] == resumed["files"]["model/model.safetensors"]
    assert whole["rows"] == resumed["rows"]
