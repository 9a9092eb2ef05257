"""A function of the user that reports steps, and fails, loses nothing: the run is saved and can be continued."""

import asyncio
import os
import re
from pathlib import Path

import pytest
from several_helpers import together
from train_helpers import build, quiet, settings, uneven

import cavesson
from cavesson.errors import StoppedError, UserCodeError
from cavesson.train.checkpoint import latest
from cavesson.train.run import Training

PROMPTS = ["a", "b"]


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ERRORS: list[BaseException] = [
    ValueError("no such chart"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), Silent(), MemoryError()
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_report_that_fails_ends_the_run_after_a_checkpoint(tmp_path: Path, error: BaseException) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise error

    training = build(tmp_path / "run", {"prompts": PROMPTS}, steps=3, checkpoint__every=0)
    with pytest.raises(UserCodeError) as raised:
        training.run(report)
    said = str(raised.value).splitlines()
    assert len(said) == 2
    assert said[0].startswith(f"the function that reports steps raised {type(error).__name__}")
    assert re.search(r"test_train_reports\.py, line \d+\)$", said[0])
    assert said[1] == "fix it; the steps before step 2 are recorded"
    assert any("continue with: " in note for note in raised.value.__notes__)
    saved = latest(tmp_path / "run")
    assert saved is not None and saved.step == 2
    resumed = Training(
        settings(tmp_path / "run", steps=3, checkpoint__every=0), prompts=PROMPTS, rewards=uneven, resume=True
    )
    resumed.run(quiet)
    build(tmp_path / "whole", {"prompts": PROMPTS}, steps=3, checkpoint__every=0).run(quiet)
    columns = ["step", "sample", "response", "reward"]
    runs = [cavesson.open(tmp_path / name).rows(columns).to_pylist() for name in ("run", "whole")]
    assert runs[0] == runs[1]


def test_a_report_that_fails_at_the_last_step_fails_after_the_model_is_saved(tmp_path: Path) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise ValueError

    training = build(tmp_path / "run", {"prompts": PROMPTS}, steps=2)
    with pytest.raises(UserCodeError, match="the function that reports steps raised ValueError"):
        training.run(report)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    saved = latest(tmp_path / "run")
    assert saved is not None and saved.step == 2


def test_a_report_may_stop_a_run(tmp_path: Path) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        raise StoppedError("enough")

    with pytest.raises(StoppedError, match=r"^enough\ncontinue with: "):
        build(tmp_path / "run", {"prompts": PROMPTS}, steps=3, checkpoint__every=0).run(report)
    saved = latest(tmp_path / "run")
    assert saved is not None and saved.step == 1


def _fails_in_one(folder: Path) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == 1 and os.environ["RANK"] == "1":
            raise ValueError("no such chart")

    with pytest.raises(UserCodeError, match="the function that reports steps raised ValueError: no such chart"):
        build(folder, {"prompts": PROMPTS}, steps=3, checkpoint__every=0).run(report)


def test_a_report_that_fails_in_one_process_ends_all_after_a_checkpoint(tmp_path: Path) -> None:
    for done in together(tmp_path, 2, _fails_in_one, tmp_path / "run"):
        assert done.code == 0, done.err
    saved = latest(tmp_path / "run")
    assert saved is not None and saved.step == 2
