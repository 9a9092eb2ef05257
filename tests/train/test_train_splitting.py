"""How a step is split into micro-batches, and how it is padded, changes nothing but rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import ALONE, every
from torch import Tensor
from torch.nn.functional import pad
from train_helpers import LORA, STOP, build, farthest, finish, move, rollouts, weights

from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.processes import Processes
from cavesson.train.optimizer import Optimizer
from cavesson.train.rollouts import Scoring
from cavesson.train.update import Learner, StepInfo, update
from cavesson.types import Batch

# AdamW divides by the root of the squared gradient, which turns rounding of a gradient near zero into a full step; a
# larger ε keeps the step a smooth function of the gradient.
SMOOTH: dict[str, Any] = {"optimizer__eps": 1e-3, "optimizer__learning_rate": 1e-2}
UPDATES: dict[str, dict[str, Any]] = {
    "single pass": {"update__epochs": 1},
    "epochs and mini-batches": {"update__epochs": 2, "update__mini_batches": 2},
}
METRICS = ("loss/total", "loss/policy", "loss/value", "policy/entropy", "policy/ratio_max", "kl/objective")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [{}, {"model__lora": LORA}], ids=["full", "lora"])
@pytest.mark.parametrize("passes", UPDATES)
def test_micro_batch_size_changes_nothing(tmp_path: Path, passes: str, model: dict[str, Any]) -> None:
    common = {**SMOOTH, **UPDATES[passes], **model, "batch_size": 7, "sampling__stop": STOP}
    start = weights(build(tmp_path / "start", **common).trainer.policy)
    whole = finish(tmp_path / "whole", **common)
    for size in (1, 3):
        parts = finish(tmp_path / f"parts-{size}", update__micro_batch_size=size, **common)
        assert farthest(weights(whole.policy), weights(parts.policy)) < 1e-5
        for one, other in zip(whole.metrics, parts.metrics, strict=True):
            assert [other[name] for name in METRICS] == pytest.approx([one[name] for name in METRICS], abs=1e-5)
    assert farthest(start, weights(whole.policy)) > 1e-3


def test_the_sampling_batch_size_changes_nothing(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", **SMOOTH)
    parts = finish(tmp_path / "parts", sampling__batch_size=4, **SMOOTH)
    assert farthest(weights(whole.policy), weights(parts.policy)) < 1e-5


PROMPTS = [[70, 71, 72], [80], [90, 91, 92, 93, 94], [100]]
RESPONSES = [[40, 41, 42, 43], [], [50, 51], [60]]
CREDITED = ("logprob", "value", "advantage", "return")


def gradients(folder: Path, batch: Batch, keep_graph: bool = False) -> dict[str, Tensor]:
    """What one update on `batch` hands to the optimiser, by parameter."""
    trainer = build(folder).trainer
    move(trainer.policy, seed=1, size=0.02)
    parts = [[0, 1, 2, 3]] if keep_graph else [[0, 1], [2, 3]]
    scoring = Scoring(trainer.policy, batch, "k1")
    scores = [scoring.score(rows, keep_graph)[1] for rows in parts]
    batch = batch.with_columns(**scoring.columns, shaped_reward=torch.tensor([1.0, -1.0, 2.0, 0.5]))
    batch = trainer.algorithm.credit(batch, 0.1, ALONE)
    optimizer = Optimizer(trainer.policy, OptimizerSettings(learning_rate=1e-9))
    once = UpdateSettings(epochs=1, max_grad_norm=None)
    learner = Learner(trainer.policy, optimizer, trainer.algorithm, Processes("cpu"))
    known = scores[0] if keep_graph else None
    list(update(learner, batch, every(batch), once, StepInfo(0, 0, 1e-9), scores=known))
    return {name: 10 * average for name, average in optimizer.state().items() if name.startswith("exp_avg.")}


def test_the_graph_of_scoring_gives_the_gradient_of_a_fresh_forward_pass(tmp_path: Path) -> None:
    batch = rollouts(PROMPTS, RESPONSES)
    fresh, reused = gradients(tmp_path / "a", batch), gradients(tmp_path / "b", batch, keep_graph=True)
    assert farthest(fresh, reused) < 1e-6
    assert max(float(gradient.abs().max()) for gradient in fresh.values()) > 0.1


@pytest.mark.parametrize("garbage", [0, 57, 257])
def test_padding_and_what_it_holds_change_nothing(tmp_path: Path, garbage: int) -> None:
    tight = rollouts(PROMPTS, RESPONSES)
    loose = Batch(
        {
            "prompt_ids": pad(tight["prompt_ids"], (3, 0), value=garbage),
            "prompt_mask": pad(tight["prompt_mask"], (3, 0)),
            "response_ids": pad(tight["response_ids"], (0, 4), value=garbage),
            "attended": pad(tight["learned"], (0, 4)),
            "learned": pad(tight["learned"], (0, 4)),
        }
    )
    policy = build(tmp_path / "run").trainer.policy
    move(policy, seed=1, size=0.02)
    for one, other in zip(policy(tight)[:3], policy(loose)[:3], strict=True):  # untrimmed
        torch.testing.assert_close(other, pad(one, (0, 4)), rtol=0, atol=1e-5)
    torch.testing.assert_close(
        policy.reference_logprob(loose), pad(policy.reference_logprob(tight), (0, 4)), rtol=0, atol=1e-5
    )
    torch.testing.assert_close(policy.reference_kl(loose), pad(policy.reference_kl(tight), (0, 4)), rtol=0, atol=1e-5)
    assert farthest(gradients(tmp_path / "a", tight), gradients(tmp_path / "b", loose)) < 1e-5
