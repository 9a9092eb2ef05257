"""Of every algorithm: what is computed at a time, and how it lies in memory, changes nothing but rounding.

Sums over other groupings of the same numbers differ by about 1e-7 of their size in float32. With a large ε AdamW's step
is a smooth function of the gradient, so a run of two or three steps carries that on to weights that differ by less than
1e-5 where they moved by 1e-3 and more.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_helpers import OFFLINE, ONLINE, farthest, quiet, timeless, tiny_run, weights
from transformers import PreTrainedModel

from cavesson.models.passes import Ways, use
from cavesson.models.tiny import tiny_model
from cavesson.train.run import Result

SMOOTH: dict[str, Any] = {"optimizer__eps": 1e-3, "optimizer__warmup_steps": 0}
MODELS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"model__lora__rank": 4}}
EXTRA: dict[str, dict[str, Any]] = {
    "sft": {"sft__neftune_alpha": 10.0},
    "reward-model": {"reward_model__centring_coef": 0.1, "data__validation": 0},  # its report takes longest
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one at a time": {"update__micro_batch_size": 1},
    "two at a time": {"update__micro_batch_size": 2},
    "by tokens": {"update__micro_batch_tokens": 20},
    "padded, by tokens": {"update__layout": "padded", "update__micro_batch_tokens": 40},
    "grouped": {"update__layout": "grouped"},
    "grouped, two at a time": {"update__layout": "grouped", "update__micro_batch_size": 2},
    "padded": {"update__layout": "padded", "update__micro_batch_size": 3},
}


def run(name: str, folder: Path, **changes: Any) -> Result:
    return tiny_run(name, folder, **{**SMOOTH, **changes}).run(quiet)


def same(one: Result, other: Result) -> None:
    assert farthest(weights(one.policy), weights(other.policy)) < 1e-5
    for first, second in zip([*one.metrics, one.final], [*other.metrics, other.final], strict=True):
        assert timeless(second) == pytest.approx(timeless(first), rel=1e-4, abs=2e-5)


def saved(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def moved(name: str, folder: Path, result: Result, **changes: Any) -> None:
    start = tiny_run(name, folder, **changes).trainer.learner.optimizer.parameters
    newest = max((result.folder / "checkpoints").glob("step-*"))
    assert farthest(dict(start), load_file(newest / "weights.safetensors")) > 1e-3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", OFFLINE)
def test_the_layout_of_examples_changes_nothing(tmp_path: Path, name: str, model: str) -> None:
    changes = {**MODELS[model], **EXTRA.get(name, {})}
    if name in (
        "dpo",
        "kto",
    ):  # of another reference: compared with itself, rounding decides which response is the likelier
        changes["reference__path"] = saved(tiny_model(seed=5), tmp_path / "reference")
    packed = run(name, tmp_path / "packed", **changes)
    for number, layout in enumerate(LAYOUTS.values()):
        same(packed, run(name, tmp_path / str(number), **changes, **layout))
    moved(name, tmp_path / "start", packed, **changes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ONLINE)
def test_the_size_of_micro_batches_changes_nothing(tmp_path: Path, name: str, model: str) -> None:
    whole = run(name, tmp_path / "whole", **MODELS[model])
    for size in (1, 2):
        same(whole, run(name, tmp_path / str(size), **MODELS[model], update__micro_batch_size=size))
    for tokens in (1, 30):  # each response alone, and a few together
        same(whole, run(name, tmp_path / f"{tokens} tokens", **MODELS[model], update__micro_batch_tokens=tokens))
    moved(name, tmp_path / "start", whole, **MODELS[model])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_packed_passes_change_nothing(tmp_path: Path, name: str, model: str) -> None:
    """As on a GPU, with the head in large pieces."""
    changes = {**MODELS[model], **EXTRA.get(name, {})}
    if name in ("dpo", "kto"):
        changes["reference__path"] = saved(tiny_model(seed=5), tmp_path / "reference")
    plain = run(name, tmp_path / "plain", **changes)
    training = tiny_run(name, tmp_path / "packed", **SMOOTH, **changes, update__micro_batch_tokens=40)
    assert list(use(training.trainer.learner.model, Ways(packed=True, compile=None))) == []
    packed = training.run(quiet)
    assert packed.policy.packed
    assert {metrics.get("policy/first_ratio_error", 0.0) for metrics in packed.metrics} == {0.0}
    same(plain, packed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, name: str) -> None:
    kept = run(name, tmp_path / "kept")
    training = tiny_run(name, tmp_path / "again", **SMOOTH, model__gradient_checkpointing=True)
    passes = {True: 0, False: 0}

    def count(*_: Any) -> None:
        passes[torch.is_grad_enabled()] += 1

    modules = dict(training.trainer.learner.model.named_modules())
    inner = next(name for name in modules if name.endswith("layers.1.mlp"))
    modules[inner].register_forward_pre_hook(count)
    again = training.run(quiet)
    updates = sum(metrics.get("optim/mini_batches", 1) for metrics in again.metrics)
    assert passes[True] == 2 * updates  # forward, and once more for backward
    same(kept, again)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_bfloat16_learns_in_float32_and_is_saved_as_it_computes(tmp_path: Path, name: str, model: str) -> None:
    result = tiny_run(name, tmp_path / "run", model__dtype="bfloat16", **MODELS[model]).run(quiet)
    for metrics in (*result.metrics, result.final):
        assert all(value == value and abs(value) < 1e30 for value in metrics.values())
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    kept, learned = load_file(newest / "optimizer.safetensors"), load_file(newest / "weights.safetensors")
    assert {tensor.dtype for tensor in (*kept.values(), *learned.values())} == {torch.float32}
    weights = dict(result.policy.named_parameters())
    for name in learned.keys() & weights.keys():  # adapters of a reward model are merged at the end
        assert torch.equal(learned[name].to(weights[name].dtype), weights[name])
    if model == "full":
        saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
