"""What fails before the first step is done leaves no folder in the way; what fails later can be continued."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from train_helpers import OFFLINE, ONLINE, build, everything, tiny_flags, tiny_run

import cavesson
from cavesson.algorithms.grpo import GRPORun
from cavesson.command_line import command_line
from cavesson.config import load
from cavesson.errors import TerminatedError, UserCodeError, UserError
from cavesson.registry import ALGORITHMS
from cavesson.train.run import Training

FAILURES = {
    "no model": {"model__path": "./nowhere"},
    "no data": {"data__path": "nowhere.jsonl"},
    "no such device": {"model__device": "abacus"},
    "a run folder below a file": {"run": "data/prompts.txt/run"},
    "a run folder that no file system takes": {"run": "n" * 300},
}  # fmt: skip


def files(folder: Path) -> list[Path]:
    """Return what is in a folder, without what Python leaves beside a module that it imports."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_what_fails_before_the_first_step_leaves_nothing(tmp_path: Path, name: str, failure: str) -> None:
    tiny_flags(name, tmp_path / "run")  # writes the data
    changes = dict(FAILURES[failure])
    if "run" in changes:
        changes["run"] = str(tmp_path / changes["run"])
    before = files(tmp_path)
    with pytest.raises(UserError) as error:
        tiny_run(name, tmp_path / "run", **changes)
    assert str(error.value).count("\n") <= 1
    assert files(tmp_path) == before


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_what_fails_in_the_first_step_leaves_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(step: int) -> dict[str, float]:
        raise ZeroDivisionError

    training = tiny_run(name, tmp_path / "run")
    monkeypatch.setattr(training.trainer, "step", fail)
    with pytest.raises(ZeroDivisionError):
        training.run(lambda *_: None)
    assert not (tmp_path / "run").exists()
    assert tiny_run(name, tmp_path / "run").run(lambda *_: None).folder == tmp_path / "run"  # nothing is in the way


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_a_report_that_fails_after_the_first_step_loses_nothing(tmp_path: Path, name: str) -> None:
    def fail(step: int, metrics: dict[str, float]) -> None:
        raise ZeroDivisionError

    run = tmp_path / "run"
    with pytest.raises(UserCodeError, match="the steps before step 1 are recorded"):
        tiny_run(name, run).run(fail)
    Training(load(ALGORITHMS[name].settings, None, tiny_flags(name, run)), resume=True).run(lambda *_: None)
    tiny_run(name, tmp_path / "whole").run(lambda *_: None)
    assert everything(run) == everything(tmp_path / "whole")


BROKEN = """
import os
from pathlib import Path

def noisy(prompts, responses, **columns):
    calls = Path(__file__).with_name("calls")
    count = int(calls.read_text()) + 1 if calls.exists() else 1
    calls.write_text(str(count))
    if count == {call} and not Path(__file__).with_name("fixed").exists():
        {what}
    return [len(response) / 10 for response in responses]
"""


def training(folder: Path, resume: bool = False, **changes: object) -> Training:
    settings = load(GRPORun, None, tiny_flags("grpo", folder, **changes))
    use = f"{folder.parent}/broken.py:noisy"
    settings = settings.model_validate({**settings.model_dump(), "rewards": [{"use": use}], "steps": 4})
    return Training(settings, resume=resume)


@pytest.mark.parametrize(
    "what", ["raise ValueError('no')", "import sys; sys.exit()", "return None", "return [10**400]"]
)
def test_a_reward_that_fails_in_the_first_step_leaves_nothing(tmp_path: Path, what: str) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(call=2, what=what))
    with pytest.raises(UserCodeError) as error:
        training(tmp_path / "run").run(lambda *_: None)
    assert str(error.value).startswith("the reward noisy r") and not hasattr(error.value, "__notes__")
    assert not (tmp_path / "run").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("every", [0, 1])
def test_a_reward_that_fails_later_loses_no_step(tmp_path: Path, every: int) -> None:
    (tmp_path / "broken.py").write_text(BROKEN.format(call=99, what="pass"))
    training(tmp_path / "whole", checkpoint__every=every).run(lambda *_: None)
    (tmp_path / "calls").unlink()
    (tmp_path / "broken.py").write_text(BROKEN.format(call=4, what="raise ValueError('no')"))
    run = tmp_path / "run"
    with pytest.raises(UserCodeError) as error:
        training(run, checkpoint__every=every).run(lambda *_: None)
    assert str(error.value).splitlines() == [
        f"the reward noisy raised ValueError: no ({tmp_path}/broken.py, line 10)",
        "fix it; the steps before step 2 are recorded",
    ]
    assert error.value.__notes__ == [f"continue with: {command_line('grpo', '--resume', run, '--accept-changes')}"]
    assert isinstance(error.value.__cause__, ValueError)
    assert set(cavesson.open(run).rows()["step"].to_pylist()) == {0, 1}
    assert cavesson.open(run).steps()["step"].to_pylist() == [0, 1]
    (tmp_path / "fixed").touch()
    again = training(run, resume=True, checkpoint__every=every)
    assert again.trainer.next_step == 2
    again.run(lambda *_: None)
    assert everything(run) == everything(tmp_path / "whole")


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EACCES, "Permission denied"), False),
        (KeyboardInterrupt(), True),
        (TerminatedError(), True),
        (ValueError(), False),
    ],
    ids=repr,
)
def test_how_to_continue_is_noted_on_what_can_be_continued(
    tmp_path: Path, error: BaseException, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> dict[str, float]:
        raise error

    failing = tiny_run("sft", tmp_path / "run", steps=1)
    monkeypatch.setattr(failing.trainer, "finish", fail)
    with pytest.raises(type(error)) as raised:
        failing.run(lambda *_: None)
    note = f"continue with: {command_line('sft', '--resume', tmp_path / 'run')}"
    assert getattr(raised.value, "__notes__", []) == ([note] if is_said else [])


def test_a_report_that_changes_metrics_changes_its_own(tmp_path: Path) -> None:
    result = tiny_run("sft", tmp_path / "run", steps=1).run(lambda step, metrics: metrics.clear())
    assert result.metrics[0]["loss/nll"] > 0


def test_a_folder_that_another_process_took_meanwhile_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def taken(prompts: list[str], responses: list[str], **columns: object) -> list[float]:
        if (run / "run.json").exists() and not (run / "theirs").exists():
            shutil.rmtree(run)
            run.mkdir()
            (run / "theirs").touch()
            other = {"pid": 1, "host": "elsewhere", "since": "2026-01-01T00:00:00+00:00", "command": "cavesson ppo"}
            (run / "writer.json").write_text(json.dumps(other))
        return [0.5] * len(responses)

    with pytest.raises(UserError, match=r"is now written by process 1 on elsewhere .*: this process stops"):
        build(run, {"rewards": taken}).run(lambda *_: None)
    assert (run / "theirs").exists() and (run / "writer.json").exists()
