"""Checkpoints are complete or absent, hold everything, and hold nothing but tensors and JSON."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors import SafetensorError
from train_helpers import LORA, PROMPTS, STOP, build, farthest, finish, quiet, settings, uneven, weights

import cavesson
from cavesson.errors import TerminatedError, UserError
from cavesson.processes import Processes
from cavesson.train import checkpoint
from cavesson.train.checkpoint import Checkpoint, latest, save
from cavesson.train.run import Training

ALONE = Processes("cpu")


def one(step: int) -> Checkpoint:
    return Checkpoint(step, {"kl_coef": 0.1 * step}, {"w": torch.full((3,), float(step))}, {"m.w": torch.zeros(2)})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@examples(deadline=None)  # a disk may be slow
@given(step=st.integers(0, 10**9), coef=st.floats(allow_nan=False), mean=st.floats(allow_nan=False))
def test_what_is_saved_comes_back(
    tmp_path_factory: pytest.TempPathFactory, step: int, coef: float, mean: float
) -> None:
    folder = tmp_path_factory.mktemp("run")
    state = {"kl_coef": coef, "moments": {"count": step, "mean": mean, "squares": 0.1}}
    given_weights = {"a.b": torch.randn(2, 3).t(), "c": torch.randn(4).bfloat16(), "scalar": torch.tensor(1.0)}
    save(folder, Checkpoint(step, dict(state), given_weights, {"step.c": torch.tensor(3.0)}), keep=1, processes=ALONE)
    found = latest(folder)
    assert found is not None and (found.step, found.state) == (step, state)
    assert farthest(found.weights, given_weights) == 0.0 and found.weights["c"].dtype == torch.bfloat16
    assert found.optimizer == {"step.c": torch.tensor(3.0)}


def test_the_newest_counts_and_only_the_newest_stay(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (2, 10, 100, 1000):
        save(tmp_path, one(step), keep=2, processes=ALONE)
        assert latest(tmp_path).step == step
    assert names(tmp_path) == ["step-00000100", "step-00001000"]


def inside(step: int, updates: int) -> Checkpoint:
    return one(step)._replace(state={"updates": [{}] * updates})


def test_checkpoints_inside_a_step_do_not_push_out_those_between_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, one(step), keep=2, processes=ALONE)
        for updates in (1, 2, 3):
            save(tmp_path, inside(step, updates), keep=2, processes=ALONE)
            assert len(names(tmp_path)) == min(step, 2) + 1
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000003-update-00000003"]
    assert latest(tmp_path).name == "step-00000003-update-00000003"


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save would remove the checkpoint, which is intact."""
    for step in (1, 3):
        save(tmp_path, one(step), keep=2, processes=ALONE)

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint, "_checksum", broken)
    with pytest.raises(UserError, match=r"^cannot read the checkpoint .*3: .*Input/output error.*; try again$"):
        latest(tmp_path)


DAMAGE = {
    "a flipped bit in the weights": ("weights.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
    "a flipped bit in the optimiser": ("optimizer.safetensors", lambda content: content[:-3] + b"\x01" + content[-2:]),
    "another number in the state": ("state.json", lambda content: content.replace(b"kl_coef\": 0", b"kl_coef\": 1")),
    "half of the weights": ("weights.safetensors", lambda content: content[: len(content) // 2]),
    "no state": ("state.json", None),
    "no checksums": ("checksums.json", None),
    "no checksums that can be read": ("checksums.json", lambda content: content[:20]),
}  # fmt: skip


def damage(checkpoint: Path, kind: str) -> str:
    """Damages a file of a checkpoint and returns its name."""
    name, how = DAMAGE[kind]
    content = (checkpoint / name).read_bytes()
    if how is None:
        (checkpoint / name).unlink()
    else:
        (checkpoint / name).write_bytes(how(content))
        assert (checkpoint / name).read_bytes() != content
    return name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path: Path, kind: str) -> None:
    for step in (1, 3):
        save(tmp_path, one(step), keep=2, processes=ALONE)
    damage(tmp_path / "checkpoints" / "step-00000003", kind)
    said: list[str] = []
    found = latest(tmp_path, said.append)
    assert found.step == 1 and farthest(found.weights, one(1).weights) == 0.0
    assert len(said) == 1 and "step-00000003 (" in said[0] and said[0].endswith("the run resumes from step-00000001")
    save(tmp_path, one(2), keep=1, processes=ALONE)
    assert names(tmp_path) == ["step-00000002"]  # neither the damaged one nor the one before it stands for the newest


def test_a_checkpoint_of_another_version_is_not_read_as_one_of_this(tmp_path: Path) -> None:
    save(tmp_path, one(2), keep=1, processes=ALONE)
    place = tmp_path / "checkpoints" / "step-00000002"
    state = json.loads((place / "state.json").read_bytes())
    for written in ({**state, "format": 9}, {name: value for name, value in state.items() if name != "format"}):
        (place / "state.json").write_text(json.dumps(written))
        sums = json.loads((place / "checksums.json").read_bytes())
        sums["state.json"] = xxhash.xxh3_128((place / "state.json").read_bytes()).hexdigest()
        (place / "checksums.json").write_text(json.dumps(sums))
        with pytest.raises(UserError, match=f"step-00000002 has format {written.get('format', 1)}, .*: resume with"):
            latest(tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", DAMAGE)
def test_no_intact_checkpoint_is_one_line(tmp_path: Path, kind: str) -> None:
    for step in (1, 3):
        save(tmp_path, one(step), keep=2, processes=ALONE)
    damage(tmp_path / "checkpoints" / "step-00000001", kind)
    damage(tmp_path / "checkpoints" / "step-00000003", "half of the weights")
    with pytest.raises(UserError) as raised:
        latest(tmp_path)
    line = str(raised.value)
    assert line.startswith(f"every checkpoint in {tmp_path / 'checkpoints'} is damaged: step-00000003 (weights.safe")
    assert "step-00000001 (" in line and "\n" not in line


def test_an_unfinished_folder_is_ignored_and_removed_by_the_next(tmp_path: Path) -> None:
    save(tmp_path, one(1), keep=2, processes=ALONE)
    unfinished = tmp_path / "checkpoints" / ".step-00000002.4711"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000001", unfinished)
    (unfinished / "state.json").unlink()
    assert latest(tmp_path).step == 1
    save(tmp_path, one(3), keep=2, processes=ALONE)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


class Killed(TerminatedError):
    pass


@pytest.mark.parametrize("call", range(5))
def test_a_death_between_files_leaves_the_checkpoint_before(
    tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, one(1), keep=1, processes=ALONE)
    calls = 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > call:
            raise Killed

    monkeypatch.setattr(
        os, "fsync", fsync
    )  # weights, optimizer, state, checksums, and the folder after it got its name
    with pytest.raises(Killed):
        save(tmp_path, one(2), keep=1, processes=ALONE)
    monkeypatch.undo()
    found = latest(tmp_path)
    step = 1 if call < 4 else 2
    assert found.step == step and farthest(found.weights, one(step).weights) == 0.0
    save(tmp_path, one(3), keep=1, processes=ALONE)
    assert names(tmp_path) == ["step-00000003"]


def save_and_die(folder: Path, given: Checkpoint, operation: int) -> bool:
    """Save with keep = 1 and die before this disk operation; whether there were so many."""
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **names: Any) -> Any:
            nonlocal count
            count += 1
            if count == operation:
                raise Killed
            return real(*arguments, **names)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "mkdir", "rename", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            save(folder, given, keep=1, processes=ALONE)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_death_while_a_checkpoint_is_saved_again_leaves_one_of_the_two(tmp_path: Path, deaths: int) -> None:
    again, died = one(1)._replace(weights={"w": torch.full((3,), 9.0)}), True
    seen, operation = set(), 0
    while died:
        operation += 1
        folder = tmp_path / str(operation)
        save(folder, one(1), keep=1, processes=ALONE)
        for _ in range(deaths):
            died = save_and_die(folder, again, operation)
        said: list[str] = []
        found = latest(folder, said.append)
        seen.add((found.step, float(found.weights["w"][0])))
        assert said == []  # none of them is damaged
        save(folder, again, keep=1, processes=ALONE)
        assert names(folder) == ["step-00000001"] and latest(folder).weights["w"][0] == 9.0
    assert seen == {(1, 1.0), (1, 9.0)}
    # 1 folder is made, 4 files and 1 folder are synced, 3 folders renamed, 4 files and 1 folder removed.
    assert operation == 1 + 14


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    # What safetensors raises on a full disk.
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_said_plainly_and_leaves_the_checkpoint_before(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, one(1), keep=1, processes=ALONE)

    def full(tensors: Any, path: Path, metadata: Any = None) -> None:
        path.write_bytes(b"a part of it")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match=r"the disk (is full|quota is used up).*; free space$") as raised:
        save(tmp_path, one(2), keep=1, processes=ALONE)
    assert "\n" not in str(raised.value)
    assert names(tmp_path) == ["step-00000001"] and latest(tmp_path).step == 1


def test_other_errors_are_not_called_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(tensors: Any, path: Path, metadata: Any = None) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(checkpoint, "save_file", denied)
    with pytest.raises(UserError, match=r"^cannot write a checkpoint in .*: \[Errno 13\] Permission denied$"):
        save(tmp_path, one(1), keep=1, processes=ALONE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every", "expected"), [(0, [5]), (2, [2, 4, 5]), (5, [5])])
def test_a_run_saves_when_it_is_told_to_and_at_the_end(tmp_path: Path, every: int, expected: list[int]) -> None:
    checkpoint = {"checkpoint__every": every, "checkpoint__keep": 9} if every else {"checkpoint__every": 0}
    finish(tmp_path / "run", steps=5, **checkpoint)
    assert names(tmp_path / "run") == [f"step-{step:08d}" for step in expected]
    files = {path.suffix for path in (tmp_path / "run" / "checkpoints").rglob("*") if path.is_file()}
    assert files == {".safetensors", ".json"}


def test_inside_a_step_a_run_saves_after_every_so_many_updates(tmp_path: Path) -> None:
    finish(tmp_path / "run", steps=1, update__epochs=7, checkpoint={"every": 1, "updates": 3, "keep": 9})
    assert names(tmp_path / "run") == [
        "step-00000000-update-00000006",
        "step-00000001",
    ]


EVERYTHING: dict[str, Any] = {
    "steps": 6, "checkpoint__every": 2, "kl__target": 0.05, "kl__horizon": 60, "kl__coef": 0.3,
    "shaping__scale": True, "shaping__normalise": True, "sampling__stop": STOP, "update__epochs": 2,
    "update__mini_batches": 2, "optimizer__schedule": "cosine", "optimizer__warmup_steps": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "full": {}, "lora": {"model__lora": LORA}, "separate critic": {"value__kind": "separate"},
    "bfloat16": {"model": {"device": "cpu", "dtype": "bfloat16"}},
}  # fmt: skip


class Stop(TerminatedError):
    pass


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_broke_off_goes_on_bit_for_bit(tmp_path: Path, model: str) -> None:
    changes = {**EVERYTHING, **MODELS[model]}
    whole = finish(tmp_path / "whole", **changes)
    for last, start in ((0, 0), (3, 2)):  # the step that was the last one, and what there is a checkpoint of
        folder = tmp_path / f"parts-{last}"
        broken_off(folder, last, changes)
        again = Training(settings(folder, **changes), prompts=PROMPTS, rewards=uneven, resume=True)
        assert again.trainer.next_step == start
        parts = again.run(quiet)
        assert [timeless(step) for step in parts.metrics] == [timeless(step) for step in whole.metrics[start:]]
        assert farthest(weights(whole.policy), weights(parts.policy)) == 0.0
        assert record(tmp_path / "whole") == record(folder)
        assert saved_weights(tmp_path / "whole") == saved_weights(folder)


def broken_off(folder: Path, last: int, changes: dict[str, Any]) -> None:
    def report(step: int, metrics: dict[str, float]) -> None:
        if step == last:
            raise Stop

    with pytest.raises(Stop):
        build(folder, **changes).run(report)


def saved_weights(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in (folder / "model").glob("*.safetensors")}
    assert found
    return found


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    own = ("time/", "machine/", "tokens_per_second")
    return {name: value for name, value in metrics.items() if not name.startswith(own)}


def record(folder: Path) -> list[Any]:
    run = cavesson.open(folder)
    rows = [{k: v for k, v in row.items() if k != "attempt"} for row in run.rows().to_pylist()]
    steps = [{k: v for k, v in timeless(row).items() if k != "attempt"} for row in run.steps().to_pylist()]
    return [rows, steps, *(run.tokens(step).to_pylist() for step in range(6))]


def test_a_checkpoint_never_knows_of_a_step_that_the_record_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def watched(folder: Path, given: Checkpoint, keep: int, processes: Processes) -> Path:
        seen.append(
            (given.step, len(set(cavesson.open(folder).rows()["step"].to_pylist())), cavesson.open(folder).steps())
        )
        return save(folder, given, keep, processes)

    monkeypatch.setattr("cavesson.train.callbacks.save", watched)
    finish(tmp_path / "run", steps=3, checkpoint__every=1)
    assert [(step, rows, metrics.num_rows) for step, rows, metrics in seen] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]


def test_the_state_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    finish(tmp_path / "run", **EVERYTHING)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert state["step"] == 6 and state["moments"]["count"] == 36
    rewards = cavesson.open(tmp_path / "run").rows(["reward"])["reward"].to_numpy()
    assert state["moments"]["mean"] == pytest.approx(rewards.mean(), abs=1e-9)
    assert state["moments"]["squares"] == pytest.approx(((rewards - rewards.mean()) ** 2).sum(), abs=1e-9)
