"""Of every algorithm: several processes are one, sharded or not, whatever does not divide evenly between them.

Tolerances are those of test_train_processes.py: sums over other groupings differ by rounding, which a large ε keeps
AdamW from blowing up.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from several_helpers import together
from torch import Tensor
from train_helpers import OFFLINE, ONLINE, SIGNAL, quiet, saved, timeless, tiny_flags, tiny_folder, tiny_run
from two_processes import algorithms

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
    "kto, a last batch smaller than the processes": {"algorithm": "kto", **SMALL, "update__micro_batch_size": 1},
    "one held-out pair": {"algorithm": "reward-model", "data__validation": 0.1, "model__lora__rank": 2},
    "grpo, resampled": {
        "algorithm": "grpo", "grpo__resample": 2, "rewards": "rare", "samples_per_prompt": 3, "batch_size": 9,
        "update__epochs": 1, "update__mini_batches": 2, "update__micro_batch_size": 2,
    },
    "grpo, parts of the reward": {
        "algorithm": "grpo", "shaping__parts": "normalised", "rewards": "parts", "samples_per_prompt": 3,
        "batch_size": 9, "grpo__scale": "batch",
    },
    "ppo, held-out prompts": {
        "algorithm": "ppo", "batch_size": 5, "data__validation": 0.84, "evaluation__every": 1,
        "update__micro_batch_size": 2,
    },
    "ppo, lora, full kl": {
        "algorithm": "ppo", "batch_size": 9, "model__lora__rank": 2, "kl__estimator": "full",
        "update__micro_batch_size": 2,
    },
    "ppo, separate critic, copied reference, recomputed": {
        "algorithm": "ppo", "batch_size": 7, "value__kind": "separate", "model__gradient_checkpointing": True,
        "kl__estimator": "full", "update__micro_batch_size": 1,
    },
    # One step: the last bit of a weight can decide which token the next step samples.
    "ppo, bfloat16": {
        "algorithm": "ppo", "batch_size": 6, "model__dtype": "bfloat16", "update__micro_batch_size": 1,
        "sampling__batch_size": 1, "steps": 1,
    },
    "distill, whole distributions, no reward": {
        "algorithm": "distill", "distill__loss_type": "full", "distill__beta": 0.5, "rewards": None, "batch_size": 9,
        "update__micro_batch_size": 2,
    },
    "distill, given responses": {
        "algorithm": "distill", "distill__loss_type": "full", "distill__own_share": 0.5, "data__path": "pairs.jsonl",
        "rewards": None, "batch_size": 9, "update__micro_batch_size": 2,
    },
    "distill, single pass, recomputed": {
        "algorithm": "distill", "update__epochs": 1, "update__mini_batches": 1, "batch_size": 9, "rewards": None,
        "distill__loss_type": "full", "model__gradient_checkpointing": True, "update__micro_batch_size": 2,
    },
    "ppo, weight decay": {"algorithm": "ppo", "batch_size": 9, "optimizer__weight_decay": 1.0},
    "raft, single pass": {"algorithm": "raft", "update__epochs": 1, "update__mini_batches": 1, "batch_size": 10},
}  # fmt: skip


SHARDED = {"parallel__shard": "full"}
OFFLOADED = {**SHARDED, "parallel__offload": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {"2": (2, {}), "2 sharded": (2, SHARDED), "4 sharded": (4, OFFLOADED)}


@pytest.fixture(scope="module", params=LAYOUTS)
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A number of processes and the folder with all their runs."""
    count, changes = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("several")
    if changes:  # sharded models are loaded slice by slice, from files
        changes = changes | {"model__path": str(tiny_folder(tmp_path_factory.mktemp("model")))}
    runs = {name: {**SMOOTH, **case, **changes} for name, case in CASES.items() if case.get("batch_size", 8) >= count}
    # Writes the teacher: in a group of processes, transformers would save it in the first one only.
    tiny_flags("distill", folder / "any")
    ended = together(folder, count, algorithms, runs, folder)
    assert [done.code for done in ended] == [0] * count, [done.err[-3000:] for done in ended]
    return count, folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Tensor]]]:
    """Return a run of one process and its weights before training."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def run(name: str) -> tuple[Path, dict[str, Tensor]]:
        changes = dict(CASES[name])
        training = tiny_run(changes.pop("algorithm"), folder / name, **SMOOTH, **changes)
        start = {key: weight.detach().clone() for key, weight in training.trainer.learner.optimizer.parameters.items()}
        training.run(quiet)
        return folder / name, start

    return run


def same_rollouts(one: Run, other: Run, rounding: float) -> None:
    first, second = one.rows(), other.rows()
    for name in ("step", "sample", "group", "prompt", "response", "finish_reason", "reward"):
        assert first[name] == second[name]
    for step in sorted(set(first["step"].to_pylist())):
        tokens, theirs = one.tokens(step), other.tokens(step)
        assert tokens["token_id"] == theirs["token_id"]
        for name in ("logprob", "advantage"):
            # Two numbers that hardly differ can be rounded to neighbours.
            # Responses to held-out prompts have no advantage.
            assert theirs[name].drop_null().to_pylist() == pytest.approx(
                tokens[name].drop_null().to_pylist(), abs=rounding / 10, rel=max(2 * SIGNAL, rounding)
            )


def measured(metrics: dict[str, Any]) -> dict[str, float]:
    """Of one step; before the policy has left its reference rounding decides which response is likelier than there."""
    unknown = ("dpo/accuracy", "eval/dpo/accuracy", "kto/accuracy", "eval/kto/accuracy") if metrics["step"] == 0 else ()
    return {name: v for name, v in timeless(metrics).items() if v is not None and name not in unknown}


@pytest.mark.parametrize("name", CASES)
def test_several_processes_are_one(
    several: tuple[int, Path], alone: Callable[[str], tuple[Path, dict[str, Tensor]]], name: str
) -> None:
    count, folder = several
    if CASES[name].get("batch_size", 8) < count:
        pytest.skip("fewer examples than processes, which is an error")
    mine, start = alone(name)
    one, run = cavesson.open(mine), cavesson.open(folder / name)
    assert run.info["processes"] == count and one.info["processes"] == 1
    assert run.info["model"]["fingerprint"] == one.info["model"]["fingerprint"]
    rounding = 2**-4 if "bfloat16" in name else 1e-3  # bfloat16 has 8 significant bits, and sums lose some of them
    same_rollouts(one, run, rounding)
    steps, theirs = one.steps().to_pylist(), run.steps().to_pylist()
    assert len(steps) == len(theirs)
    for here, there in zip(steps, theirs, strict=True):
        assert measured(there) == pytest.approx(measured(here), rel=rounding, abs=rounding / 10)
    newest = max((mine / "checkpoints").glob("step-*")).relative_to(mine)
    for kind in ("weights", "optimizer"):
        same_tensors(saved(mine / newest, kind), saved(folder / name / newest, kind), rounding)
    model = next((mine / "model").glob("*model.safetensors")).relative_to(mine)
    same_tensors(load_file(mine / model), load_file(folder / name / model), rounding)
    weights = saved(mine / newest, "weights")
    assert max(float((weight - start[key]).abs().max()) for key, weight in weights.items()) > 2e-3


def same_tensors(mine: dict[str, Tensor], theirs: dict[str, Tensor], rounding: float) -> None:
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        # Averages of gradients are small, so their bound is a part of the largest one; weights are about 1.
        weight = rounding < 2**-8 and not key.startswith("exp_avg")
        slack = 1e-4 if weight else rounding * float(tensor.abs().max())
        torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=slack)


def test_the_pieces_of_a_run_are_there_once(several: tuple[int, Path]) -> None:
    _, folder = several
    for run in (one for one in folder.iterdir() if one.name in CASES):
        assert len(list((run / "model").glob("*model.safetensors"))) == 1
        assert (run / "reference.safetensors").exists() == (CASES[run.name]["algorithm"] in ("dpo", "kto"))
        assert (run / "training_sets").exists() == (CASES[run.name]["algorithm"] == "raft")
        assert not list(run.rglob("*.tmp"))
