"""Every algorithm, killed at any moment, goes on to the bits of the run that nobody killed."""

import shutil
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from train_helpers import OFFLINE, ONLINE, everything, tiny_flags

sys.path.append(str(Path(__file__).parents[1] / "cli"))
from cli_helpers import cavesson

LORA = {"model.lora.rank": 2}
# Killed inside a step as well: with two passes over two mini-batches, three of a step's checkpoints are inside it.
INSIDE = {"checkpoint.updates": 1, "rewards": "noisy"}
RESAMPLED = {**INSIDE, "grpo.resample": 2, "samples_per_prompt": 2, "rewards": "rare", "steps": 3}
GIVEN = {"rewards": None, "data.path": "pairs.jsonl", "distill.loss_type": "full", "distill.own_share": 0.5}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in OFFLINE},
    **{name: (name, INSIDE) for name in ONLINE},
    "sft with noise": ("sft", {"sft.neftune_alpha": 10, "update.micro_batch_size": 2}),
    "sft from a stream": ("sft", {"data.stream": True, "data.validation": 0, "data.shuffle_buffer": 3, "steps": 4}),
    "sft from nothing": ("sft", {"model.new.layers": 1, "model.new.hidden_size": 16, "model.new.heads": 2}),
    "reward-model with adapters": ("reward-model", {**LORA, "data.validation": 0}),
    "dpo with adapters": ("dpo", LORA),
    "kto with adapters": ("kto", LORA),
    "grpo with adapters, resampled": ("grpo", {**RESAMPLED, **LORA}),
    "rloo without a reference": ("rloo", {**INSIDE, "kl.coef": 0, "reference.kind": "none"}),
    "ppo with held-out prompts": ("ppo", {**INSIDE, "data.validation": 0.4, "evaluation.every": 1}),
    "distill without a reward": ("distill", {**INSIDE, "rewards": None, "distill.loss_type": "full"}),
    "distill on given responses": ("distill", {**INSIDE, **GIVEN}),
    "in bfloat16": ("grpo", {**INSIDE, "model.dtype": "bfloat16", "steps": 1}),
}
# Of the disk operations of the whole run; several mean that the resumed run is killed as well.
KILLS = [(0.92,), (0.45, 0.25)]
QUICK = {"ppo", "dpo"}


class Whole(NamedTuple):
    """A run that nobody interrupted."""

    name: str
    changes: dict[str, Any]
    operations: int
    result: dict[str, Any]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    name, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("whole")
    cavesson(folder, "--help")  # the first process is forked from one that must still import everything
    done = cavesson(folder, name, *tiny_flags(name, folder / "run", **changes))
    assert done.code == 0, done.err
    return Whole(name, changes, int((folder / ".operations").read_text()), everything(folder / "run"))


def again(folder: Path, name: str, changes: dict[str, Any]) -> list[str]:
    """What a person types after a kill: go on, or start anew where nothing was begun."""
    if (folder / "run" / "run.json").exists():
        return [name, "--resume", "run"]
    shutil.rmtree(folder / "run", ignore_errors=True)
    return [name, *tiny_flags(name, folder / "run", **changes)]


def newest(folder: Path) -> str:
    return max((path.name for path in (folder / "run" / "checkpoints").glob("step-*")), default="")


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    """Where two results differ; a NaN is a NaN."""
    if isinstance(first, dict) and isinstance(second, dict):
        names = [*first, *(name for name in second if name not in first)]
        return [d for n in names for d in differences(first.get(n), second.get(n), f"{place}/{n}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [d for i, pair in enumerate(zip(first, second, strict=True)) for d in differences(*pair, f"{place}/{i}")]
    same = first == second or (first != first and second != second)
    return [] if same else [f"{place}: {first!r:.80} {second!r:.80}"]


@pytest.mark.sampled(1)
def test_killed_anywhere(whole: Whole, tmp_path: Path) -> None:
    left = []
    for number, fractions in enumerate(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for fraction in fractions:
            operation = 1 + int(fraction * whole.operations)
            done = cavesson(folder, *again(folder, whole.name, whole.changes), die_at=operation)
            assert done.code == -signal.SIGKILL, done.err
            left.append(newest(folder))
        done = cavesson(folder, *again(folder, whole.name, whole.changes))
        assert done.code == 0, done.err
        assert differences(whole.result, everything(folder / "run")) == [], fractions
    assert any(left)  # it went on from somewhere
    if "checkpoint.updates" in whole.changes:
        assert any("update" in name for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("whole", ["grpo with adapters, resampled"], indirect=True)
def test_what_was_resampled_could_go_wrong(whole: Whole) -> None:
    sampled = [sum(row["step"] == step for row in whole.result["rows"]) for step in range(3)]
    assert len(set(sampled)) > 1  # so nobody knows beforehand which prompts a step begins with


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_a_finished_run_says_so_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    assert cavesson(tmp_path, name, *tiny_flags(name, tmp_path / "run")).code == 0
    before = everything(tmp_path / "run")
    done = cavesson(tmp_path, name, "--resume", "run")
    assert done.code == 0 and "is complete: all its" in done.out, done.err
    assert differences(before, everything(tmp_path / "run")) == []


@pytest.mark.slow
def test_dpo_killed_at_every_moment_around_the_reference_pass(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert cavesson(whole, "dpo", *tiny_flags("dpo", whole / "run")).code == 0
    expected = everything(whole / "run")
    before, after = [], []
    for operation in range(1, 40):
        folder = tmp_path / str(operation)
        folder.mkdir()
        assert cavesson(folder, "dpo", *tiny_flags("dpo", folder / "run"), die_at=operation).code == -signal.SIGKILL
        if (folder / "run" / "reference.safetensors").exists():
            after.append(folder)
            break
        if (folder / "run" / "run.json").exists():
            before.append(folder)
    assert not newest(after[0])
    # The last kill without the numbers, when they were written but not yet in place, and the first one with them.
    assert (before[-1] / "run" / "reference.tmp").exists()
    for folder in (before[-1], after[0]):
        done = cavesson(folder, "dpo", "--resume", "run")
        assert done.code == 0, done.err
        assert everything(folder / "run") == expected


def test_dpo_does_not_take_a_trained_policy_for_the_reference(tmp_path: Path) -> None:
    flags = tiny_flags("dpo", tmp_path / "run")
    assert cavesson(tmp_path, "dpo", *flags).code == 0
    for name in ("step-00000002", "step-00000003"):
        assert (tmp_path / "run" / "checkpoints" / name).exists()
    (tmp_path / "run" / "reference.safetensors").unlink()
    done = cavesson(tmp_path, "dpo", "--resume", "run")
    assert done.code == 2 and len(done.err.splitlines()) == 1
    assert "reference.safetensors is missing" in done.err
