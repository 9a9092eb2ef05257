"""Going on with a run: after damage, where nothing was begun, and with other settings."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train_helpers import PROMPTS, build, farthest, finish, quiet, settings, tiny_run, uneven, weights

import cavesson
import cavesson.train.run
import cavesson.train.update
from cavesson.command_line import continuation
from cavesson.errors import NoMemoryError, StoppedError, TerminatedError, UserError
from cavesson.record import write_run
from cavesson.train.resuming import settings_of
from cavesson.train.run import Training

INSIDE: dict[str, Any] = {"steps": 4, "checkpoint__every": 1, "update__mini_batches": 2, "checkpoint__updates": 1}


def resumed(folder: Path, **changes: Any) -> Training:
    return Training(settings(folder, **changes), prompts=PROMPTS, rewards=uneven, resume=True)


class Stop(TerminatedError):
    pass


def broken_off(folder: Path, after: int, **changes: Any) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == after:
            raise Stop

    with pytest.raises(Stop):
        Training(settings(folder, **changes), prompts=PROMPTS, rewards=uneven).run(report)


def rewards(folder: Path) -> list[float]:
    return cavesson.open(folder).rows(["reward"])["reward"].to_pylist()


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_intact_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = finish(tmp_path / "whole", **INSIDE)
    broken_off(tmp_path / "run", 3, **INSIDE)
    kept = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000002", "step-00000003", "step-00000003-update-00000007"]
    content = (kept[2] / "rollouts.safetensors").read_bytes()
    (kept[2] / "rollouts.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    again = resumed(tmp_path / "run", **INSIDE)
    assert again.trainer.next_step == 3 and again.trainer.unfinished is None
    done = again.run()
    reason = "step-00000003-update-00000007 (rollouts.safetensors does not match its checksum)"
    said = f"damaged in {tmp_path / 'run' / 'checkpoints'}: {reason}; the run resumes from step-00000003"
    assert said in capsys.readouterr().out.splitlines()
    assert farthest(weights(whole.policy), weights(done.policy)) == 0.0
    assert rewards(tmp_path / "whole") == rewards(tmp_path / "run")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("left", ["nothing", "empty", "killed"])
def test_resuming_starts_what_was_not_begun(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "run"
    if left != "nothing":
        folder.mkdir()
    if left == "killed":
        for name in (".lock", "writer.json", ".run.json.0123", ".writer.json.0123"):
            (folder / name).touch()
        (folder / ".writable-0123" / "run").mkdir(parents=True)
    resumed(folder).run(quiet)
    finish(tmp_path / "whole")
    assert rewards(folder) == rewards(tmp_path / "whole") != []


def test_an_empty_folder_is_free_and_one_with_other_files_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert finish(tmp_path / "empty").folder == tmp_path / "empty"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    for resume in (False, True):
        with pytest.raises(UserError, match="other exists and is not an empty folder: choose a new one"):
            Training(settings(tmp_path / "other"), prompts=PROMPTS, rewards=uneven, resume=resume)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


def test_a_longer_run_is_the_run_that_was_as_long_from_its_start(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", steps=4)
    finish(tmp_path / "run", steps=2)
    training = resumed(tmp_path / "run", steps=4, checkpoint__keep=1, doctor__on_finding="ignore")
    done = training.run(quiet)
    assert [len(done.metrics), len(whole.metrics)] == [2, 4]
    assert farthest(weights(whole.policy), weights(done.policy)) == 0.0
    assert rewards(tmp_path / "whole") == rewards(tmp_path / "run")
    info = cavesson.open(tmp_path / "run").info
    assert info["steps"] == info["config"]["steps"] == 4 and info["config"]["checkpoint"]["keep"] == 1
    changed = {"steps": [2, 4], "checkpoint.keep": [2, 1], "doctor.on_finding": ["warn", "ignore"]}
    assert info["changes"] == [{"attempt": 1, "start_step": 2, "settings": changed}]
    attempt = json.loads((tmp_path / "run" / "attempts" / "0001.json").read_bytes())
    assert (attempt["attempt"], attempt["start_step"]) == (1, 2)


def test_the_number_of_processes_is_that_of_the_latest_attempt(tmp_path: Path) -> None:
    run = tmp_path / "run"
    Training(settings(run, data__path=str(written(tmp_path)), rewards=[{"use": "lowercase"}])).run(quiet)
    write_run(run, cavesson.open(run).info | {"processes": 2})
    before = cavesson.open(run).info
    assert "--processes 2" in str(continuation(run))
    Training(settings_of(run, "ppo", []), resume=True).run(quiet)
    assert cavesson.open(run).info == before | {"processes": 1}
    assert "--processes" not in str(continuation(run))


@pytest.mark.slow
def test_a_schedule_over_other_steps_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(tmp_path / "run", steps=2, optimizer__schedule="linear")
    resumed(tmp_path / "run", steps=3, optimizer__schedule="linear").run()
    out = capsys.readouterr().out.splitlines()
    assert "changed: steps 2 → 3" in out
    assert any(line.startswith("the linear schedule now decays over 3 steps") for line in out)
    rates = cavesson.open(tmp_path / "run").steps()["optim/learning_rate"].to_pylist()
    assert rates == pytest.approx([1e-3, 0.5e-3, 1e-3 / 3])  # 2 steps left of 2, 1 of 2, then 1 of 3


LESS_MEMORY: list[dict[str, Any]] = [
    {"update__micro_batch_size": 2, "sampling__batch_size": 4, "model__gradient_checkpointing": True},
    {"update__in_backward": True},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("change", LESS_MEMORY, ids=" ".join)
def test_a_run_goes_on_in_other_parts_of_a_step(tmp_path: Path, change: dict[str, Any]) -> None:
    """Micro-batches, and what is kept for the backward pass, change nothing but rounding."""
    whole = finish(tmp_path / "whole", steps=3, checkpoint__every=1)
    broken_off(tmp_path / "run", 1, steps=3, checkpoint__every=1)
    done = resumed(tmp_path / "run", steps=3, checkpoint__every=1, **change).run(quiet)
    assert len(done.metrics) == 2
    assert farthest(weights(whole.policy), weights(done.policy)) < 1e-4
    assert rewards(tmp_path / "run") == pytest.approx(rewards(tmp_path / "whole"))


def exhausted(message: str) -> Callable[..., Any]:
    def fail(*given: Any, **names: Any) -> Any:
        if message:
            raise torch.OutOfMemoryError(message)
        return torch.empty(2**60)  # more than an address can name

    return fail


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB", "2.50 GiB"),
        ("", f"{4 * 2**60} bytes"),
    ],
)
def test_too_little_memory_is_said_with_the_settings_that_need_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, wanted: str
) -> None:
    begun = build(tmp_path / "run", steps=4, checkpoint__every=1, update__micro_batch_size=3)
    calls = 0

    def optimize(*given: Any, **names: Any) -> Any:
        nonlocal calls
        calls += 1
        return (exhausted(message) if calls == 9 else real)(*given, **names)  # four of them in a step

    real = cavesson.train.update.optimize
    monkeypatch.setattr(cavesson.train.update, "optimize", optimize)
    with pytest.raises(NoMemoryError) as raised:
        begun.run(quiet)
    said = str(raised.value).splitlines()
    assert said[0] == f"step 2: out of memory: {wanted} more could not be allocated"
    assert "a smaller update.micro_batch_size (now 3)" in said[1] and "model.gradient_checkpointing = true" in said[1]
    assert raised.value.__notes__ == ["continue with: Training(..., resume=True) in Python"]
    monkeypatch.undo()
    done = resumed(tmp_path / "run", steps=4, checkpoint__every=1, update__micro_batch_size=1)
    assert done.trainer.next_step == 2
    done.run(quiet)


def test_too_little_memory_before_the_first_step_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cavesson.train.run, "build", exhausted("CUDA out of memory"))
    with pytest.raises(NoMemoryError, match=r"^before the first step: out of memory\n"):
        build(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_errors_of_pytorch_are_not_called_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cavesson.train.run, "build", lambda *given: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        build(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer__learning_rate": 1e-2}, "optimizer.learning_rate = 0.001, and cannot resume with 0.01"),
        ({"update__epochs": 2}, "update.epochs = 4, and cannot resume with 2"),
        ({"batch_size": 12}, "batch_size = 6, and cannot resume with 12"),
        ({"seed": 1}, "seed = 0, and cannot resume with 1"),
    ],
)
def test_what_must_stay_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    finish(tmp_path / "run")
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(UserError) as raised:
        resumed(tmp_path / "run", steps=4, **change)
    assert str(raised.value).startswith(f"{tmp_path / 'run'} was started with {named}; only these may change: steps,")
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_a_run_cannot_be_shorter_than_it_is(tmp_path: Path) -> None:
    finish(tmp_path / "run", steps=3)
    with pytest.raises(UserError, match=r"has already done 3 steps: it cannot end after 2"):
        resumed(tmp_path / "run", steps=2)


def test_a_run_is_not_resumed_into_another_folder(tmp_path: Path) -> None:
    Training(settings(tmp_path / "run", data__path=str(written(tmp_path)), rewards=[{"use": "lowercase"}])).run(quiet)
    assert settings_of(tmp_path / "run", "ppo", ["--run", str(tmp_path / "run")]).run == tmp_path / "run"
    with pytest.raises(UserError, match=r"--resume continues in .*run; remove --run.*cavesson ppo --resume .*run$"):
        settings_of(tmp_path / "run", "ppo", ["--run", "other"])


def written(folder: Path) -> Path:
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    return folder / "prompts.txt"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("begun", [False, True])
def test_the_lock_of_a_run_has_heartbeats_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Another machine can then tell a job that was killed while it loaded its model from one that still does."""
    if begun:
        broken_off(tmp_path, 0, **INSIDE)
    name = "build" if begun else "write_run"  # what a run does next when it has its lock
    real = getattr(cavesson.train.run, name)

    def later(*given: Any) -> Any:
        deadline = time.monotonic() + 60
        while "heartbeats" not in json.loads((tmp_path / "writer.json").read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return real(*given)

    monkeypatch.setattr(cavesson.train.run, name, later)
    Training(settings(tmp_path, **INSIDE), prompts=PROMPTS, rewards=uneven, resume=begun).run(quiet)


@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_a_description_that_is_deleted_is_noticed_at_the_next_step_and_written_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    training = tiny_run(name, folder, steps=4)
    content: list[bytes] = []

    def report(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            content.append((folder / "run.json").read_bytes())
            (folder / "run.json").unlink()

    with pytest.raises(StoppedError, match=r"stopped after 2 of 4 steps: .*run\.json was deleted") as stopped:
        training.run(report)
    assert (folder / "run.json").read_bytes() == content[0]
    assert any("continue with" in note for note in stopped.value.__notes__)
    resumed = Training(settings_of(folder, name, ()), resume=True)
    assert len(resumed.run(quiet).metrics) == 2
