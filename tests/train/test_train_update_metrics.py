"""Metrics of an update by hand: what counts once per token, what once per response, and what padding must not reach."""

import math
from typing import Any

import pytest
import torch
from batch_helpers import ALONE, every
from torch import Tensor, nn

from cavesson.algorithms.base import RolloutAlgorithm
from cavesson.algorithms.grpo import GRPO
from cavesson.algorithms.ppo import PPO
from cavesson.algorithms.rloo import RLOO
from cavesson.algorithms.settings import OptimizerSettings, UpdateSettings
from cavesson.train.metrics import staleness_metrics
from cavesson.train.optimizer import Optimizer
from cavesson.train.update import Learner, StepInfo, update
from cavesson.types import Batch, Rollouts, Scores


class Table(nn.Module):
    """A model whose log-probabilities are its only weights."""

    def __init__(self, logprob: Tensor) -> None:
        super().__init__()
        self.logprob = nn.Parameter(logprob)

    def forward(self, batch: Batch) -> Scores:
        logprob = self.logprob[batch["row"]][:, : batch["learned"].shape[1]]
        return Scores(logprob, torch.zeros_like(logprob), torch.zeros_like(logprob))


def updated(algorithm: RolloutAlgorithm, ratios: list[list[float]], **settings: Any) -> dict[str, float]:
    """The metrics of one update of responses whose tokens have these ratios; padding has the ratios 1000 and 0.001."""
    width = max(map(len, ratios)) + 2
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in ratios])
    padded = torch.tensor([[*row, *([1e3, 1e-3] * width)][:width] for row in ratios])
    zero = torch.zeros_like(mask)
    batch = Batch(
        {
            "row": torch.arange(len(ratios)), "prompt_mask": torch.ones(len(ratios), 1),
            "attended": mask, "learned": mask,
            "logprob": zero, "advantage": torch.ones_like(mask), "value": zero, "return": zero,
            "ended": torch.tensor([1.0] * (len(ratios) - 1) + [0.0]),
        }
    )  # fmt: skip
    model = Table(padded.log())
    learner = Learner(model, Optimizer(model, OptimizerSettings()), algorithm, ALONE)
    once = UpdateSettings(**{"epochs": 1, "max_ratio": None, **settings})
    (seen,) = update(learner, batch, every(batch), once, StepInfo(0, 0, 0.0))
    return seen


UNEVEN = [[4.0], [1.0, 1.0, 1.0], [], [2.0, 2.0]]
"""The last one was cut at the length limit."""


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (GRPO(longest=3), (4 + 3 + 4) / 6),
        (GRPO(longest=3, normalise="constant"), (4 + 3 + 4) / 6),
        (GRPO(longest=3, ratio="sequence"), (4 + 1 + 2) / 3),
        (GRPO(longest=3, ratio="sequence", normalise="sequence"), (4 + 1 + 2) / 3),
        (GRPO(longest=3, ratio="sequence", normalise="constant"), (4 + 1 + 2) / 3),
        (GRPO(longest=3, ratio="sequence", overlong="filter"), (4 + 1) / 2),
        (RLOO(), (4 + 1 + 4) / 3),  # of a whole response, 2 · 2
        (RLOO(ratio="token"), (4 + 3 + 4) / 6),
        (PPO(), (4 + 3 + 4) / 6),
    ],
)
def test_a_ratio_of_a_whole_response_counts_once(algorithm: RolloutAlgorithm, expected: float, size: int) -> None:
    seen = updated(algorithm, UNEVEN, micro_batch_size=size)
    assert seen["policy/ratio"] == pytest.approx(expected, rel=1e-6)


def test_the_limit_of_the_ratio_is_of_responses_under_gspo() -> None:
    # Of tokens the mean is (4 + 3)/4 = 1.75, of responses (4 + 1)/2 = 2.5.
    ratios = [[4.0], [1.0, 1.0, 1.0]]
    for algorithm, limit, skipped in (
        (GRPO(longest=3), 1.74, 1.0),
        (GRPO(longest=3), 1.76, 0.0),
        (GRPO(longest=3, ratio="sequence"), 2.49, 1.0),
        (GRPO(longest=3, ratio="sequence"), 2.51, 0.0),
    ):
        assert updated(algorithm, ratios, max_ratio=limit)["optim/skipped"] == skipped


@pytest.mark.parametrize("size", [0, 1, 2])
@pytest.mark.parametrize("algorithm", [GRPO(longest=4), RLOO(ratio="token"), PPO()])
def test_maxima_are_over_tokens_that_count(algorithm: RolloutAlgorithm, size: int) -> None:
    seen = updated(algorithm, [[0.5, 1.25], [], [0.75]], micro_batch_size=size)
    assert seen["policy/ratio_max"] == pytest.approx(1.25)
    assert seen["policy/ratio_error_max"] == pytest.approx(0.5)


def test_maxima_below_zero_and_of_negative_numbers() -> None:
    seen = updated(GRPO(longest=4), [[0.25, 0.5], [0.125]])
    assert seen["policy/ratio_max"] == pytest.approx(0.5)  # padding is neither 0 nor 1
    assert seen["policy/ratio_error_max"] == pytest.approx(0.875)


def test_the_oldest_weights_are_those_of_a_token() -> None:
    # Padding of the version column is 0: weights as old as the run.
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    batch = Batch({"attended": mask, "learned": mask, "sampler_version": torch.tensor([[5, 6, 0], [4, 0, 0]])})
    rollouts = Rollouts(batch=batch, prompt=[], response=[], finish_reason=[], prompt_index=[], sample=[])
    found = staleness_metrics(rollouts, 7, ALONE)
    assert found == {"staleness/mean": pytest.approx((2 + 1 + 3) / 3), "staleness/max": 3.0}


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [
        # Exactly at a limit nothing is cut off; just beyond it, a gradient that would lead further away is.
        (1.0, 0.49, (0, 0)), (1.0, 0.5, (0, 0)), (1.0, 1.5, (0, 0)), (1.0, 1.75, (0, 0)), (1.0, 1.76, (0, 1)),
        (-1.0, 0.49, (1, 0)), (-1.0, 0.5, (0, 0)), (-1.0, 0.51, (0, 0)), (-1.0, 1.76, (0, 0)), (0.0, 0.1, (0, 0)),
        (0.0, 9.0, (0, 0)),
    ],
)  # fmt: skip
def test_clip_fractions_at_the_limits(advantage: float, ratio: float, expected: tuple[int, int]) -> None:
    old = torch.zeros(1, 1)
    batch = Batch({"attended": old + 1, "learned": old + 1, "logprob": old, "advantage": old + advantage})
    algorithm = GRPO(longest=1, clip_low=0.5, clip_high=0.75)
    scores = Scores(torch.tensor([[math.log(ratio)]], requires_grad=True), old, None)
    result = algorithm.loss(scores, batch)
    seen = tuple(int(result.means[f"policy/clip_{side}"]) for side in ("low", "high"))
    assert seen == expected and int(result.means["policy/clip_fraction"]) == sum(expected)
    # The identity behind it: what is clipped has no gradient, all else −Â · ρ.
    (gradient,) = torch.autograd.grad(result.loss.sum(), scores.logprob)
    assert gradient.item() == pytest.approx(0.0 if sum(expected) else -advantage * ratio, rel=1e-6)
