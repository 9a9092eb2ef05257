"""The short run, and the coefficient it suggests."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check_helpers import found, run_of

from dressage.check.short_run import First, Suggestion, judge, short_run, short_settings, suggested_coefficient


def test_the_coefficient_ends_at_its_target_where_rewards_are_normal() -> None:
    """Tilting N(0, σ²) by exp(r/β) shifts it by σ²/β; the KL of the two normals is then σ²/(2β²)."""
    beta = suggested_coefficient(0.7, 0.0, 0.0, 6.0)
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


def test_a_kl_of_wider_spread_asks_for_a_smaller_coefficient() -> None:
    # σ_Δ = 10 at 2 nats is 10·√(8/2) = 20 at 8 nats, over the normal √16 = 4.
    assert suggested_coefficient(1.0, 2.0, 10.0, 8.0) == pytest.approx(1 / 20)
    # A narrower one than normal counts as normal, and so does a run that has not moved.
    assert suggested_coefficient(1.0, 2.0, 0.1, 8.0) == pytest.approx(1 / 4)
    assert suggested_coefficient(1.0, 0.0, 5.0, 8.0) == pytest.approx(1 / 4)
    assert suggested_coefficient(3.0, 2.0, 10.0, 8.0) == pytest.approx(3 / 20)


def test_short_settings_measure_the_kl_and_do_not_penalise_it(tmp_path: Path) -> None:
    run = run_of("grpo", tmp_path, samples_per_prompt=4, batch_size=32, kl__coef=0.1, reference__kind="auto")
    short = short_settings(run, 11, 3, tmp_path)
    assert (short.steps, short.batch_size, short.kl.coef, short.reference.kind) == (3, 8, 0.0, "auto")
    assert short.optimizer.learning_rate == run.optimizer.learning_rate
    raft = run_of("raft", tmp_path, raft__k=4, batch_size=32, update__mini_batches=4, optimizer__warmup_steps=5)
    short = short_settings(raft, 16, 2, tmp_path)
    assert (short.batch_size, short.update.mini_batches, short.reference.kind) == (16, 4, "auto")
    assert short.optimizer.warmup_steps == 0


def test_a_short_run_of_a_healthy_recipe(tmp_path: Path) -> None:
    run = run_of("ppo", tmp_path, sampling__max_new_tokens=8)
    first, suggestion, errors = short_run(run, 8, 2)
    assert errors == []
    assert first.responses == 8
    assert 1 <= first.lengths[0] <= first.lengths[1] <= first.lengths[2] <= 8
    assert first.equal_groups is None
    assert suggestion.coef == pytest.approx(
        suggested_coefficient(suggestion.reward_std, suggestion.kl, suggestion.kl_std, 6.0)
    )
    assert not (tmp_path / "run").exists()


def verdicts(folder: Path, first: dict[str, Any] | None = None, coef: float = 0.05) -> dict[str, str]:
    seen = {"responses": 8, "ended": 0.9, "lengths": (1, 2, 3), "reward": 0.0, "reward_std": 1.0, "equal_groups": 0.1}
    suggestion = Suggestion(0.05, 6.0, 1.0, 1.0, math.sqrt(2))
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
