"""The short run, and the coefficient it suggests."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from check_helpers import found, run_of

from cavesson.algorithms.grpo import GRPO
from cavesson.check.short_run import (
    First,
    Suggestion,
    _suggestion,
    correlation,
    judge,
    short_run,
    short_settings,
    suggested_coefficient,
)
from cavesson.types import Batch, Scores


def test_the_coefficient_ends_at_its_target_where_rewards_are_normal() -> None:
    """Tilting N(0, σ²) by exp(r/β) shifts it by σ²/β; the KL of the two normals is then σ²/(2β²)."""
    beta = suggested_coefficient(0.7, 1.0, 6.0)
    assert 0.7**2 / (2 * beta**2) == pytest.approx(6.0)
    # The same by numbers: weights exp(r/β) on a fine grid of r.
    reward = np.linspace(-12, 12, 100_001) * 0.7
    before = np.exp(-(reward**2) / (2 * 0.7**2))
    before /= before.sum()
    after = before * np.exp(reward / beta)
    after /= after.sum()
    inside = (after > 1e-300) & (before > 1e-300)
    after, before = after[inside], before[inside]
    assert float((after * np.log(after / before)).sum()) == pytest.approx(6.0, rel=1e-3)


@pytest.mark.slow
def test_a_log_ratio_that_follows_the_reward_less_asks_for_a_smaller_coefficient() -> None:
    """By numbers: of r and a log-ratio Δ with correlation 0.2, the best multiple of Δ ends at the target."""
    draws = np.random.default_rng(0).standard_normal((2, 400_000))
    reward, log_ratio = 3.0 * draws[0], 0.2 * draws[0] + math.sqrt(1 - 0.2**2) * draws[1]
    beta = suggested_coefficient(3.0, 0.2, 0.5)

    def gain_and_kl(s: float) -> tuple[float, float]:
        weights = np.exp(s * log_ratio)
        weights /= weights.sum()
        return float(weights @ reward), float(weights @ np.log(weights * len(weights)))

    steps = np.linspace(0.5, 1.5, 41)
    best = max(steps, key=lambda s: gain_and_kl(s)[0] - beta * gain_and_kl(s)[1])
    assert gain_and_kl(best)[1] == pytest.approx(0.5, rel=0.06)


def test_in_grpo_advantages_and_penalty_balance_at_the_target() -> None:
    """Two tokens, each worth about a normal reward: π ∝ π_ref·exp(A/β) has the target's KL and GRPO's loss is flat."""
    grid = torch.linspace(-5, 5, 61, dtype=torch.float64)
    normal = -(grid**2) / 2
    first, second = (pair.flatten() for pair in torch.meshgrid(torch.arange(61), torch.arange(61), indexing="ij"))
    worth = torch.stack([0.6 * grid, 0.8 * grid])  # 0.36 + 0.64: the advantage has a spread of 1
    beta = suggested_coefficient(1.0, 1.0, 3.0)
    logits = (normal + worth / beta).requires_grad_()
    reference, policy = normal.log_softmax(0), logits.log_softmax(1)
    assert (policy.exp() * (policy - reference)).sum().item() == pytest.approx(3.0, rel=0.01)

    logprob = torch.stack([policy[0, first], policy[1, second]], dim=1)
    chances = logprob.detach().sum(1).exp()
    earned = worth[0, first] + worth[1, second]
    advantage = earned - chances @ earned
    batch = Batch(
        {
            "logprob": logprob.detach(),
            "ref_logprob": torch.stack([reference[first], reference[second]], dim=1),
            "advantage": advantage[:, None].expand(-1, 2),
            "attended": torch.ones_like(logprob),
            "learned": torch.ones_like(logprob),
            "kl_coef": torch.full_like(chances, beta),
        }
    )

    def slope(batch: Batch) -> float:
        loss = GRPO(kl_estimator="k2").loss(Scores(logprob, torch.zeros_like(logprob), None), batch).loss
        return float(torch.autograd.grad((chances @ loss).sum(), logits, retain_graph=True)[0].abs().max())

    assert slope(batch) < 1e-9
    assert slope(batch.with_columns(kl_coef=batch["kl_coef"] * 1.1)) > 1e-3


def test_the_correlation_is_within_groups_and_at_least_that_of_chance() -> None:
    # Deviations (−1, 1) and (−2, 2) from the groups' means, beside (−1, 1) and (1, −1): (2 − 4) / √(10·4) < 0.
    assert correlation([[0, 2], [10, 14]], [[5, 7], [9, 7]]) == pytest.approx(1 / math.sqrt(4))
    # (2 + 4) / √(10·4) = 0.949
    assert correlation([[0, 2], [10, 14]], [[5, 7], [7, 9]]) == pytest.approx(6 / math.sqrt(40))
    assert correlation([[0, 2], [10, 14]], [[0, 0], [0, 0]]) == 0.5  # a run that has not moved


@pytest.mark.parametrize(
    ("command", "changes", "spread"),
    [
        ("grpo", {}, 1.0),  # GRPO divides by it
        ("grpo", {"grpo__scale": "none"}, math.sqrt(2.5)),
        ("grpo", {"grpo__kl_in": "reward", "kl__coef": 0.1}, math.sqrt(2.5)),  # the penalty is divided as well
        ("rloo", {}, math.sqrt(2.5)),
        ("ppo", {"samples_per_prompt": 1, "batch_size": 4}, math.sqrt(131 / 4)),
    ],
)
def test_what_the_penalty_is_weighed_against(
    command: str, changes: dict[str, Any], spread: float, tmp_path: Path
) -> None:
    """Rewards (0, 2) and (10, 14): variances 1 and 4 within groups, and 131/4 of all four, which have the mean 6.5."""
    rewards, kls = [0.0, 2.0, 10.0, 14.0], [5.0, 7.0, 7.0, 9.0]
    rows = [
        {"step": step, "sample": i, "shaped_reward": reward, "kl_k1": step * kl}
        for step in (0, 1)
        for i, (reward, kl) in enumerate(zip(rewards, kls, strict=True))
    ]
    run = run_of(command, tmp_path, **({"samples_per_prompt": 2, "batch_size": 4} | changes))
    suggestion = _suggestion(run, rows)
    assert suggestion.reward_std == pytest.approx(spread)
    if command != "ppo":
        assert suggestion.follows == pytest.approx(6 / math.sqrt(40))
    assert (suggestion.kl, suggestion.target) == (7.0, 6.0)
    assert suggestion.coef == pytest.approx(spread * suggestion.follows / math.sqrt(12))
    assert _suggestion(run, [row | {"shaped_reward": 1.0} for row in rows]).coef == 0.0


def test_short_settings_measure_the_kl_and_do_not_penalise_it(tmp_path: Path) -> None:
    run = run_of("grpo", tmp_path, samples_per_prompt=4, batch_size=32, kl__coef=0.1, reference__kind="auto")
    short = short_settings(run, 11, 3, tmp_path)
    assert (short.steps, short.batch_size, short.kl.coef, short.reference.kind) == (3, 8, 0.0, "auto")
    assert short.optimizer.learning_rate == run.optimizer.learning_rate
    assert short_settings(run_of("ppo", tmp_path, parallel__shard="full"), 8, 1, tmp_path).parallel.shard == "none"
    for asked in ({"data__validation": 0.5}, {"data__validation_path": "other.txt"}):
        evaluated = run_of("ppo", tmp_path, evaluation__every=1, **asked)
        short = short_settings(evaluated, 8, 1, tmp_path)
        assert not short.data.holds_out and short.evaluation.every == 0
    raft = run_of("raft", tmp_path, raft__k=4, batch_size=32, update__mini_batches=4, optimizer__warmup_steps=5)
    short = short_settings(raft, 16, 2, tmp_path)
    assert (short.batch_size, short.update.mini_batches, short.reference.kind) == (16, 4, "auto")
    assert short.optimizer.warmup_steps == 0


def test_a_short_run_of_a_healthy_recipe(tmp_path: Path) -> None:
    run = run_of("ppo", tmp_path, sampling__max_new_tokens=8)
    measured = short_run(run, 8, 2)
    first, suggestion = measured.first, measured.suggestion
    assert first is not None and suggestion is not None
    assert (measured.batch, measured.errors) == ("8 responses", [])
    assert first.responses == 8
    assert 1 <= first.lengths[0] <= first.lengths[1] <= first.lengths[2] <= 8
    assert first.equal_groups is None
    assert suggestion.coef == pytest.approx(suggested_coefficient(suggestion.reward_std, suggestion.follows, 6.0))
    assert not (tmp_path / "run").exists()


def verdicts(folder: Path, first: dict[str, Any] | None = None, coef: float = 0.05) -> dict[str, str]:
    seen = {"responses": 8, "ended": 0.9, "lengths": (1, 2, 3), "reward": 0.0, "reward_std": 1.0, "equal_groups": 0.1}
    suggestion = Suggestion(0.05, 6.0, 1.0, 1.0, 1.0, math.sqrt(2))
    run = run_of("ppo", folder, kl__coef=coef)
    return found(judge(First(**(seen | (first or {})), samples=()), suggestion, run))  # type: ignore[arg-type]


def test_verdicts_on_the_first_responses(tmp_path: Path) -> None:
    assert verdicts(tmp_path) == {}
    assert verdicts(tmp_path, {"ended": 0.49}) == {"responses-cut": "warning"}
    assert verdicts(tmp_path, {"equal_groups": 0.51}) == {"groups-equal": "warning"}
    assert verdicts(tmp_path, {"equal_groups": None}) == {}


def test_a_coefficient_that_is_far_off(tmp_path: Path) -> None:
    assert verdicts(tmp_path, coef=0.00049) == {"kl-coefficient-measured": "warning"}
    assert verdicts(tmp_path, coef=0.00051) == {}
    assert verdicts(tmp_path, coef=0.49) == {}
    assert verdicts(tmp_path, coef=0.51) == {"kl-coefficient-measured": "warning"}
    assert verdicts(tmp_path, coef=0.0) == {}
