"""A run whose reward has changed resumes only if the user accepts that, and records it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from train_helpers import PROMPTS, quiet, settings, tiny_flags, tiny_run

from cavesson.algorithms.ppo import PPORun
from cavesson.config import load
from cavesson.errors import UserCodeError, UserError
from cavesson.record import run_info, write_run
from cavesson.record.read.show import show
from cavesson.train.resuming import settings_of
from cavesson.train.run import Training

BREAKS = "def uneven(prompts, responses, **columns):\n    return [1 / COUNT for _ in responses]\n"
WORKS = BREAKS.replace("COUNT", "len(responses)")


def scaled(factor: float) -> Callable[..., list[float]]:
    def length(prompts: list[str], responses: list[str], **_: Any) -> list[float]:
        return [factor * len(response) for response in responses]

    return length


def trained(folder: Path, factor: float, steps: int, **more: Any) -> Training:
    return Training(settings(folder, steps=steps), prompts=PROMPTS, rewards=scaled(factor), **more)


def test_a_changed_function_is_refused_unless_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(folder, 0.1, steps=1).run(quiet)
    before = run_info(folder)["rewards"]
    assert list(before) == ["length"]
    with pytest.raises(UserError, match=r"the reward length has another source or model than before; .*accept_changes"):
        trained(folder, -0.1, steps=2, resume=True)
    trained(folder, -0.1, steps=2, resume=True, accept_changes=True).run(quiet)
    info = run_info(folder)
    (change,) = info["changes"]
    assert change["attempt"] == 1 and change["start_step"] == 1
    was, now = change["settings"]["rewards.length.fingerprint"]
    assert was != now and before["length"].startswith(was) and info["rewards"]["length"].startswith(now)
    trained(folder, -0.1, steps=3, resume=True).run(quiet)  # what was accepted is what the run has now


def test_a_reward_that_fails_is_corrected_with_the_command_that_the_error_prints(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "data" / "rewards.py"
    made = load(PPORun, None, tiny_flags("ppo", folder, steps=3))
    file.write_text(WORKS)
    training = Training(made)

    def report(step: int, metrics: dict[str, float]) -> None:
        training.collector.rewards[0].function.__globals__.pop("len", None)
        training.collector.rewards[0].function.__globals__["len"] = None  # breaks the reward after the first step

    with pytest.raises(UserCodeError) as failed:
        training.run(report)
    assert failed.value.__notes__[-1].endswith(f"ppo --resume {folder} --accept-changes")
    file.write_text(WORKS.replace("1 /", "2 /"))
    with pytest.raises(UserError, match="the reward uneven has another source"):
        Training(settings_of(folder, "ppo", []), resume=True)
    Training(settings_of(folder, "ppo", []), resume=True, accept_changes=True).run(quiet)
    console = Console(record=True, width=200, quiet=False)
    show(folder, console)
    assert "rewards.uneven.fingerprint" in console.export_text()


def test_changed_weights_of_rewards_are_settings_that_can_be_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tiny_run("ppo", folder, steps=1).run(quiet)
    use = run_info(folder)["config"]["rewards"][0]["use"]
    flags = ["--steps=2", f'--rewards=[{{use = "{use}", name = "uneven", weight = 2.0}}]']
    with pytest.raises(UserError, match=r"cannot resume with .*and with --accept-changes rewards"):
        Training(settings_of(folder, "ppo", flags), resume=True)
    Training(settings_of(folder, "ppo", flags), resume=True, accept_changes=True).run(quiet)
    was, now = run_info(folder)["changes"][0]["settings"]["rewards"]
    assert (was[0]["weight"], now[0]["weight"]) == (1.0, 2.0)


def test_runs_without_fingerprints_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trained(folder, 0.1, steps=1).run(quiet)
    write_run(folder, {name: value for name, value in run_info(folder).items() if name != "rewards"})
    trained(folder, 0.2, steps=2, resume=True).run(quiet)
    assert list(run_info(folder)["rewards"]) == ["length"]


def test_accepting_changes_needs_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="accept_changes has no effect without resume"):
        trained(tmp_path / "run", 0.1, steps=1, accept_changes=True)
