"""Gradients of weights in bfloat16 are added up in float32, over micro-batches and over processes."""

import json
from pathlib import Path

import pytest
import torch
from batch_helpers import every, split
from several_helpers import together
from torch import Tensor
from train_helpers import rollouts
from two_gradients import gradients

from cavesson.algorithms.raft import RAFT
from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.models.load import prepare
from cavesson.models.policy import Policy
from cavesson.models.tiny import tiny_model
from cavesson.processes import Processes
from cavesson.train.optimizer import Optimizer
from cavesson.train.update import Learner, StepInfo, update

ROWS = 128


@pytest.mark.slow
def test_the_sum_of_many_micro_batches_is_that_of_float64() -> None:
    responses = [[40 + row % 7, 60 + row % 11, 90 + row % 13][: 1 + row % 3] for row in range(ROWS)]
    batch = rollouts([[70 + row % 17, 100 + row % 5] for row in range(ROWS)], responses)
    batch = batch.with_columns(advantage=batch["learned"])
    policy = Policy(prepare(tiny_model(dtype=torch.bfloat16)))
    optimizer = Optimizer(policy, OptimizerSettings())
    weights = list(policy.parameters())
    sums = [torch.zeros_like(weight, dtype=torch.float64) for weight in weights]
    for row in split(batch, 1):
        gradients = torch.autograd.grad(-policy(row).logprob.sum() / batch["learned"].sum(), weights)
        for total, gradient in zip(sums, gradients, strict=True):
            total += gradient.double()
    once = UpdateSettings(epochs=1, micro_batch_size=1, max_grad_norm=None)
    learner = Learner(policy, optimizer, RAFT(), Processes("cpu"))
    (seen,) = update(learner, batch, every(batch), once, StepInfo(0, 0, 1e-9))
    state = optimizer.state()
    averages = [state[f"exp_avg.{name}"].double() / (1 - 0.9) for name in optimizer.parameters]
    assert error(averages, sums) < 1e-6
    norm = sum(float((total**2).sum()) for total in sums) ** 0.5
    assert abs(seen["optim/grad_norm"] / norm - 1) < 1e-5


def error(seen: list[Tensor], expected: list[Tensor]) -> float:
    """The length of the difference over the length of what is expected."""
    differences = sum(float(((a - b) ** 2).sum()) for a, b in zip(seen, expected, strict=True))
    return float((differences / sum(float((b**2).sum()) for b in expected)) ** 0.5)


@pytest.mark.slow
def test_the_sum_over_processes_is_in_float32(tmp_path: Path) -> None:
    ended = together(tmp_path, 2, gradients, tmp_path / "gradients.json")
    assert [done.code for done in ended] == [0, 0], ended
    assert json.loads((tmp_path / "gradients.json").read_text()) == [[257.0, 257.0], [513.0, 513.0]]
