"""Each check of the settings fires on a broken recipe and is silent on its healthy neighbour."""

import math
from pathlib import Path
from typing import Any

import pytest
from check_helpers import found, run_of

from cavesson.check.settings import check_settings, highest_rate
from cavesson.command_line import command_line
from cavesson.findings.finding import Finding
from cavesson.record import write_run

LARGE = 1_000_000_000

BROKEN: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    # check, command, what breaks it, its healthy neighbour, severity
    ("filtered-sampling", "ppo", {"sampling__top_k": 50}, {"sampling__top_k": 0}, "error"),
    ("filtered-sampling", "ppo", {"sampling__top_p": 0.9}, {"sampling__top_p": 1.0}, "error"),
    ("filtered-sampling", "grpo", {"sampling__min_new_tokens": 4}, {"sampling__min_new_tokens": 0}, "warning"),
    ("filtered-sampling", "raft", {"sampling__top_k": 5, "reference__kind": "auto"}, {"sampling__top_k": 5}, "warning"),
    (
        "temperature-missing",
        "raft",
        {"sampling__temperature": 0.8, "reference__kind": "auto", "kl__coef": 0.1},
        {"sampling__temperature": 0.8},
        "warning",
    ),
    ("kl-target", "ppo", {"kl__target": 50.0}, {"kl__target": 6.0}, "warning"),
    ("kl-coefficient", "ppo", {"kl__coef": 1.0}, {"kl__coef": 0.05}, "warning"),
    ("learning-rate", "sft", {"optimizer__learning_rate": 0.1}, {"optimizer__learning_rate": 1e-3}, "warning"),
    ("learning-rate", "sft", {"optimizer__learning_rate": 1e-9}, {"optimizer__learning_rate": 1e-5}, "warning"),
    ("warm-up", "sft", {"optimizer__warmup_steps": 20}, {"optimizer__warmup_steps": 19}, "warning"),
    (
        "micro-batch",
        "ppo",
        {"update__micro_batch_size": 8, "update__mini_batches": 2},
        {"update__micro_batch_size": 4, "update__mini_batches": 2},
        "note",
    ),
    ("estimator-misplaced", "ppo", {"kl__estimator": "k3"}, {"kl__estimator": "k1"}, "warning"),
    ("estimator-misplaced", "grpo", {"grpo__kl_estimator": "k1", "kl__coef": 0.1}, {"kl__coef": 0.1}, "warning"),
    # 0.95^89 = 0.0104 and 0.95^90 = 0.0099
    ("reward-fades", "ppo", {"sampling__max_new_tokens": 90}, {"sampling__max_new_tokens": 89}, "warning"),
]


@pytest.mark.parametrize(("name", "command", "broken", "healthy", "severity"), BROKEN)
def test_fires_on_the_broken_one_alone(
    name: str, command: str, broken: dict[str, Any], healthy: dict[str, Any], severity: str, tmp_path: Path
) -> None:
    assert found(check_settings(run_of(command, tmp_path, **broken), 200_000, True)) == {name: severity}
    assert found(check_settings(run_of(command, tmp_path, **healthy), 200_000, True)) == {}


def test_reinforcement_learning_of_a_large_model_takes_smaller_steps(tmp_path: Path) -> None:
    high = {"optimizer__learning_rate": 2e-4}
    assert found(check_settings(run_of("ppo", tmp_path, **high), LARGE, False)) == {"learning-rate": "warning"}
    assert found(check_settings(run_of("sft", tmp_path, **high), LARGE, False)) == {}
    lora = {"model__lora": {"rank": 8}}
    assert found(check_settings(run_of("ppo", tmp_path, **high, **lora), LARGE, False)) == {}


def test_a_run_in_a_folder_that_is_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert folder_fixes(tmp_path) == []  # an empty folder is free
    (run / "thesis.tex").touch()
    assert folder_fixes(tmp_path) == ["--run another folder"]
    write_run(run, {"algorithm": "dpo", "config": {}, "inputs": [], "processes": 1})
    way = command_line("dpo", "--resume", run)
    assert folder_fixes(tmp_path) == [f"--run another folder, or continue that run with: {way}"]


def folder_fixes(folder: Path) -> list[str]:
    results = [r for r in check_settings(run_of("ppo", folder), 200_000, True) if isinstance(r, Finding)]
    assert {(result.rule, result.severity) for result in results} <= {("run-folder", "error")}
    return [result.fix for result in results]


def test_highest_rate_is_that_of_the_paper() -> None:
    # arXiv:2001.08361, equation D.1, for 1.5 billion weights: 0.003239 - 0.0001395 * ln(1.5e9) = 0.003239 - 0.002948.
    assert math.isclose(highest_rate(1_500_000_000), 0.000291, rel_tol=2e-3)
    assert highest_rate(10**12) == 1e-4
