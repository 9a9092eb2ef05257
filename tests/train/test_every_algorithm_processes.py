"""Of every algorithm: two processes are one, whatever does not divide evenly between them.

Tolerances are those of test_train_processes.py: sums over other groupings differ by rounding, which a large ε keeps
AdamW from blowing up.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_processes import HERE, torchrun
from train_helpers import OFFLINE, ONLINE, SIGNAL, quiet, timeless, tiny_run

import cavesson
from cavesson.record import Run

pytestmark = pytest.mark.slow
SMOOTH: dict[str, Any] = {"optimizer__eps": 1e-3}
# Batches of five and of seven, the last one of the examples of two; odd numbers of held-out examples and of groups.
ODD: dict[str, Any] = {"batch_size": 5, "data__validation": 0.375}
NOISE: dict[str, Any] = {"sft__neftune_alpha": 10.0, "update__layout": "grouped", "update__micro_batch_size": 1}
SMALL: dict[str, Any] = {"batch_size": 3, "epochs": 1, "data__validation": 0.5}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name, **ODD} for name in OFFLINE},
    **{name: {"algorithm": name, "batch_size": 9} for name in ONLINE},
    "raft": {"algorithm": "raft", "batch_size": 10, "raft__k": 2, "update__mini_batches": 3},
    "sft with noise": {"algorithm": "sft", **NOISE, **ODD},
    "a last batch smaller than the processes": {"algorithm": "dpo", **SMALL},
    "one held-out pair": {"algorithm": "reward-model", "data__validation": 0.1, "model__lora__rank": 2},
    "grpo, resampled": {
        "algorithm": "grpo", "grpo__resample": 2, "rewards": "rare", "samples_per_prompt": 3, "batch_size": 9,
        "update__epochs": 1, "update__mini_batches": 2, "update__micro_batch_size": 2,
    },
    "raft, single pass": {"algorithm": "raft", "update__epochs": 1, "update__mini_batches": 1, "batch_size": 10},
}  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all runs of two processes; starting them takes longer than running them."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "runs.json").write_text(json.dumps({name: {**SMOOTH, **changes} for name, changes in CASES.items()}))
    done = torchrun(str(HERE / "two_processes.py"), "runs.json", ".", folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def same_rollouts(one: Run, other: Run) -> None:
    first, second = one.rows(), other.rows()
    for name in ("step", "sample", "group", "prompt", "response", "finish_reason", "reward"):
        assert first[name] == second[name]
    for step in sorted(set(first["step"].to_pylist())):
        tokens, theirs = one.tokens(step), other.tokens(step)
        assert tokens["token_id"] == theirs["token_id"]
        for name in ("logprob", "advantage"):
            # Two numbers that hardly differ can be rounded to neighbours.
            assert theirs[name].to_pylist() == pytest.approx(tokens[name].to_pylist(), abs=1e-4, rel=2 * SIGNAL)


def measured(metrics: dict[str, Any]) -> dict[str, float]:
    """Of one step; before the policy has left its reference rounding decides which response is likelier than there."""
    unknown = ("dpo/accuracy", "eval/dpo/accuracy") if metrics["step"] == 0 else ()
    return {name: v for name, v in timeless(metrics).items() if v is not None and name not in unknown}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(two: Path, tmp_path: Path, name: str) -> None:
    changes = dict(CASES[name])
    training = tiny_run(changes.pop("algorithm"), tmp_path / "run", **SMOOTH, **changes)
    start = {key: weight.detach().clone() for key, weight in training.trainer.learner.optimizer.parameters.items()}
    training.run(quiet)
    alone, run = cavesson.open(tmp_path / "run"), cavesson.open(two / name)
    assert run.info["processes"] == 2 and alone.info["processes"] == 1
    same_rollouts(alone, run)
    steps, theirs = alone.steps().to_pylist(), run.steps().to_pylist()
    assert len(steps) == len(theirs)
    for one, other in zip(steps, theirs, strict=True):
        assert measured(other) == pytest.approx(measured(one), rel=1e-3, abs=1e-4)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    mine = load_file(newest / "weights.safetensors")
    other_weights = load_file(two / name / "checkpoints" / newest.name / "weights.safetensors")
    assert mine.keys() == other_weights.keys()
    for key, weight in mine.items():
        torch.testing.assert_close(weight, other_weights[key], rtol=0, atol=1e-4)
    assert max(float((weight - start[key]).abs().max()) for key, weight in mine.items()) > 2e-3


def test_the_pieces_of_a_run_are_there_once(two: Path) -> None:
    for name, changes in CASES.items():
        assert (two / name / "model" / "model.safetensors").exists()
        assert (two / name / "reference.safetensors").exists() == (changes["algorithm"] == "dpo")
        assert (two / name / "training_sets").exists() == (changes["algorithm"] == "raft")
        assert not list((two / name).rglob("*.tmp"))
