"""Gradients that are applied while the backward pass runs: the same weights, bit for bit, from less memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from train_helpers import OFFLINE, ONLINE, everything, farthest, finish, quiet, settings, tiny_run, weights

from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.errors import NonFiniteError, UserError
from cavesson.processes import Processes
from cavesson.train.build import Inputs
from cavesson.train.build import build as build_trainer
from cavesson.train.in_backward import InBackward
from cavesson.train.optimizer import Optimizer

MODELS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora in bfloat16": {"model__lora__rank": 4, "model__dtype": "bfloat16"},
    "recomputed": {"model__gradient_checkpointing": True},
    "bfloat16": {"model__dtype": "bfloat16"},
}
CLIPPED = 0.05
"""Gradient norm, far below those of the first steps"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", [*OFFLINE, *ONLINE])
def test_a_run_is_the_same_bit_for_bit(tmp_path: Path, name: str, model: str) -> None:
    changes = {**MODELS[model], "update__max_grad_norm": CLIPPED}
    result = tiny_run(name, tmp_path / "usual", **changes).run(quiet)
    tiny_run(name, tmp_path / "inside", **changes, update__in_backward=True).run(quiet)
    assert max(step["optim/grad_norm"] for step in result.metrics) > CLIPPED
    usual, inside = everything(tmp_path / "usual"), everything(tmp_path / "inside")
    for part in usual:
        if part != "files":
            assert inside[part] == usual[part]
    tensors = [name for name in usual["files"] if "weights" in name or "optimizer" in name or name.startswith("model/")]
    assert len(tensors) >= 3
    assert {name: inside["files"][name] for name in tensors} == {name: usual["files"][name] for name in tensors}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("guard", [{"max_ratio": 1.0001}, {"target_policy_kl": 1e-6}])
def test_updates_that_are_skipped_or_stopped_change_nothing(tmp_path: Path, guard: dict[str, float]) -> None:
    changes = {"update__epochs": 3, **{f"update__{name}": value for name, value in guard.items()}}
    usual = finish(tmp_path / "usual", **changes)
    inside = finish(tmp_path / "inside", **changes, update__in_backward=True)
    assert any(step["optim/skipped"] or step["optim/stopped"] for step in usual.metrics)
    assert farthest(weights(usual.policy), weights(inside.policy)) == 0.0


class Chain(nn.Module):
    """Layers after one another, the first and the last with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def both(limit: float | None, dtype: torch.dtype = torch.float32) -> tuple[list[nn.Module], list[Tensor]]:
    """A module after three steps in which gradients are applied afterwards, and after three in which they are not."""
    modules, norms = [], []
    for kind in (Optimizer, InBackward):
        torch.manual_seed(1)
        module = Chain().to(dtype)
        optimizer = kind(module, OptimizerSettings(weight_decay=0.1))
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(module(torch.full((2, 5), step + 1.0, dtype=dtype)))
            norms.append(optimizer.grad_norm(limit))
            optimizer.step(0.1)
        modules.append(module)
    return modules, norms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 1e-3, 1e3])
def test_shared_weights_get_the_sum_of_their_gradients(limit: float | None, dtype: torch.dtype) -> None:
    (usual, inside), norms = both(limit, dtype)
    assert norms[:3] == norms[3:]
    assert farthest(weights(usual), weights(inside)) == 0.0


def test_only_one_gradient_is_in_memory_at_a_time() -> None:
    module, alive = Chain(), []

    def count(_: Tensor) -> None:
        alive.append(sum(parameter.grad is not None for parameter in module.parameters()))

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    optimizer = InBackward(module, OptimizerSettings())
    optimizer.backward(module(torch.ones(2, 5)))
    optimizer.grad_norm(1.0)
    optimizer.step(0.1)
    assert alive == [1] * 14  # seven weights, twice
    assert all(parameter.grad is None for parameter in module.parameters())


def test_the_norm_is_that_of_this_mini_batch_alone() -> None:
    module = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
    optimizer = InBackward(module, OptimizerSettings())
    optimizer.backward(3 * module[0].weight.sum() + 4 * module[1].weight.sum())
    assert optimizer.grad_norm(None) == pytest.approx(5.0)
    optimizer.zero_grad()
    optimizer.backward(2 * module[1].weight.sum())
    assert optimizer.grad_norm(None) == pytest.approx(2.0)


def test_a_gradient_that_is_not_a_number_changes_nothing(tmp_path: Path) -> None:
    run = tiny_run("sft", tmp_path / "run", update__in_backward=True)
    before = weights(run.trainer.learner.model)
    spoiled = next(iter(run.trainer.learner.optimizer.parameters.values()))
    spoiled.register_hook(lambda gradient: gradient * torch.nan)
    with pytest.raises(NonFiniteError, match="the gradient is NaN"):
        run.run(quiet)
    assert farthest(weights(run.trainer.learner.model), before) == 0.0


def test_it_needs_whole_mini_batches_and_one_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="micro_batch_size has no effect with in_backward"):
        UpdateSettings(in_backward=True, micro_batch_size=2)
    two = cast("Processes", SimpleNamespace(count=2))
    with pytest.raises(UserError, match="in_backward needs a single process"):
        build_trainer(settings(tmp_path / "run", update__in_backward=True), Inputs(), two)
