"""What a run leaves to the plan: the fastest values that fit, chosen once and kept."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from check_helpers import run_of

sys.path.append(str(Path(__file__).parents[1] / "train"))
from train_helpers import build, quiet, tiny_run

from cavesson.errors import UserError
from cavesson.plan import predict
from cavesson.plan.choice import chosen
from cavesson.train.by_plan import left_to_plan, with_choices

AUTO = {"model__gradient_checkpointing": "auto", "update__micro_batch_tokens": "auto"}
KEPT = {False: 8, "half": 5, True: 2}
"""Units of memory per token that are kept."""


def within(units: int) -> Callable[[Any], bool]:
    return lambda run: (run.update.micro_batch_tokens or 1000) * KEPT[run.model.gradient_checkpointing] <= units * 1000


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (200, (False, 16384)),
        (100, (False, 8192)),
        (45, ("half", 8192)),
        (40, (True, 16384)),
        (20, (True, 8192)),
        (10, (True, 4096)),
        (3, (True, 1024)),
        (1, (True, 1024)),  # nothing fits
    ],
)
def test_the_fastest_that_fit_are_chosen(tmp_path: Path, units: int, expected: tuple[Any, int]) -> None:
    run = run_of("grpo", tmp_path, **AUTO)
    assert tuple(chosen(run, within(units)).values()) == expected
    assert left_to_plan(with_choices(run, chosen(run, within(units)))) == []


def test_only_what_is_left_to_the_plan_is_chosen(tmp_path: Path) -> None:
    modes = run_of("sft", tmp_path, model__gradient_checkpointing="auto")
    assert [chosen(modes, within(units)) for units in (8, 5, 2)] == [
        {"model.gradient_checkpointing": mode} for mode in KEPT
    ]
    tokens = run_of("sft", tmp_path, update__micro_batch_tokens="auto")
    assert chosen(tokens, within(70)) == {"update.micro_batch_tokens": 8192}
    assert chosen(run_of("sft", tmp_path), within(1)) == {}


def test_a_run_says_what_the_plan_chooses_for_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "free_memory", lambda device: 2**30)
    values, (note,) = predict.choose(run_of("sft", tmp_path, **AUTO, model__compile="none"), torch.device("cuda"))
    assert values == {"model.gradient_checkpointing": False, "update.micro_batch_tokens": 16384}
    assert note.startswith("model.gradient_checkpointing = false and update.micro_batch_tokens = 16384, by the plan: ")
    assert note.endswith(" of 1.1 GB of free memory")


def test_a_run_keeps_what_the_plan_has_chosen(tmp_path: Path) -> None:
    tiny_run("sft", tmp_path / "run", steps=1).run(quiet)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    info["chosen"] = {"model.gradient_checkpointing": "half", "update.micro_batch_tokens": 20}
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    again = tiny_run("sft", tmp_path / "run", {"resume": True}, **AUTO)
    assert again.trainer.settings.update.micro_batch_tokens == 20  # whatever would fit now
    assert not any("by the plan" in note for note in again._remarks)
    again.run(quiet)
    kept = json.loads((tmp_path / "run" / "run.json").read_text())
    assert kept["chosen"] == info["chosen"]
    assert kept["config"]["model"]["gradient_checkpointing"] == "auto"


def test_nothing_is_planned_for_a_cpu(tmp_path: Path) -> None:
    message = 'gradient_checkpointing and update.micro_batch_tokens = "auto" is planned for GPUs only; on a CPU, set a'
    with pytest.raises(UserError, match=f"{message} value: cavesson check RECIPE.toml --short-run measures"):
        tiny_run("sft", tmp_path / "run", **AUTO)


def test_what_the_settings_do_not_name_cannot_be_planned(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'gradient_checkpointing "auto" needs all .* prompts= was given in Python'):
        build(tmp_path / "run", model__gradient_checkpointing="auto")
