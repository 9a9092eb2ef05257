import itertools
import math
from typing import Any

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import LIMIT, accumulated, full, moved, scores, trl_inputs, trl_trainer, uneven, weighted_means

from cavesson.algorithms.grpo import GRPO
from cavesson.algorithms.rloo import RLOO, RLOORun
from cavesson.config import load
from cavesson.errors import UserError
from cavesson.types import Batch


def credited(rewards: list[float], group: list[int], **changes: Any) -> list[float]:
    """Advantages `[B]` of responses of one token."""
    columns = {"shaped_reward": torch.tensor(rewards), "group_in_step": torch.tensor(group)}
    batch = Batch({**columns, "attended": torch.ones(len(rewards), 1), "learned": torch.ones(len(rewards), 1)})
    return RLOO(**changes).credit(batch, 0.0, ALONE)["advantage"][:, 0].tolist()


def test_advantages_by_hand():
    # 1 − (2 + 6)/2, 2 − (1 + 6)/2, 6 − (1 + 2)/2, and 3 − 5, 5 − 3
    assert credited([1.0, 2.0, 6.0, 3.0, 5.0], [0, 0, 0, 1, 1]) == pytest.approx([-3, -1.5, 4.5, -2, 2])


def test_equal_rewards_teach_nothing():
    assert credited([0.1] * 7, [2] * 6 + [8]) == [0.0] * 7
    assert credited([0.1] * 7, [2] * 6 + [8], whiten_advantages=True) == [0.0] * 7


def test_advantages_are_those_of_grpo_times_g_over_g_minus_one():
    batch = uneven()
    ours = RLOO(kl_estimator="k1").credit(batch, 0.3, ALONE)
    theirs = GRPO(scale="none", kl_in="reward", kl_estimator="k1").credit(batch, 0.3, ALONE)
    torch.testing.assert_close(ours["signal"], theirs["signal"])
    torch.testing.assert_close(ours["advantage"], theirs["advantage"] * 4 / 3)


@pytest.mark.parametrize("whiten", [False, True])
def test_advantages_are_those_of_trl(whiten):
    utils = pytest.importorskip("trl.trainer.utils")
    batch = uneven()
    spent = ((batch["logprob"] - batch["ref_logprob"]) * batch["learned"]).sum(1)
    rewards = (batch["shaped_reward"] - 0.3 * spent).view(2, 4)
    expected = (rewards - (rewards.nansum(1, keepdim=True) - rewards) / 3).flatten()
    if whiten:
        expected = (expected - expected.nanmean()) / (utils.nanstd(expected) + 1e-4)
    ours = RLOO(whiten_advantages=whiten).credit(batch, 0.3, ALONE)["advantage"]
    torch.testing.assert_close(ours, expected[:, None] * batch["learned"])


def test_the_kl_is_taken_off_the_reward():
    batch = uneven()
    delta = batch["logprob"] - batch["ref_logprob"]
    for name, spent in {"k1": delta, "k2": delta**2 / 2, "k3": (-delta).exp() - 1 + delta}.items():
        signal = RLOO(kl_estimator=name).credit(batch, 0.3, ALONE)["signal"]
        torch.testing.assert_close(signal, batch["shaped_reward"] - 0.3 * (spent * batch["learned"]).sum(1))
    assert "loss/kl" not in weighted_means(RLOO(), RLOO().credit(batch, 0.3, ALONE), moved(batch))


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_the_first_pass_is_reinforce(ratio):
    # ∇ of −1/B · Σ_i Â_i · log π(y_i)
    batch = RLOO().credit(uneven(), 0.0, ALONE)
    algorithm = RLOO(ratio=ratio)
    _, gradient = accumulated(algorithm, batch, batch["logprob"], 8)
    torch.testing.assert_close(gradient, -batch["advantage"] / 8)
    result = algorithm.loss(scores(batch["logprob"]), batch)
    assert result.means["policy/ratio"][batch["learned"] > 0].eq(1).all()
    assert result.maxima["policy/ratio_error_max"][batch["learned"] > 0].eq(0).all()


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_importance_weights_the_gradient_of_each_token(ratio):
    # ∇ of −1/B · Σ_i Â_i · Σ_t w_t · log π(y_t), times ρ after the first pass, as long as nothing is clipped.
    batch = RLOO().credit(uneven(), 0.0, ALONE)
    chance = torch.Generator().manual_seed(0)
    batch = batch.with_columns(
        sampler_logprob=batch["logprob"] + 0.7 * torch.randn(batch["learned"].shape, generator=chance)
    )
    weight = (batch["logprob"] - batch["sampler_logprob"]).exp().clamp(max=1.5)
    algorithm = RLOO(ratio=ratio, importance=1.5, clip_low=0.9, clip_high=9.0)
    for by in (0.0, 0.01):
        logprob = batch["logprob"] + by
        rho = math.exp(by) if ratio == "token" else (by * batch["learned"].sum(1, keepdim=True)).exp()
        _, gradient = accumulated(algorithm, batch, logprob, 8)
        torch.testing.assert_close(gradient, -batch["advantage"] * weight * rho / 8)


def test_the_ratio_of_a_long_response_stays_finite():
    batch = RLOO().credit(uneven(), 0.0, ALONE)
    result = RLOO().loss(scores(batch["logprob"] + 200.0), batch)
    assert result.loss[batch["learned"] > 0].isfinite().all()
    assert result.maxima["policy/ratio_max"][batch["learned"] > 0].min() > 1e30  # the guard of the update sees it


def test_loss_and_gradient_are_those_of_trl():
    algorithm = RLOO(clip_high=0.28)
    batch = algorithm.credit(full(uneven()), 0.0, ALONE)
    loss, gradient = accumulated(algorithm, batch, moved(batch, -0.8), len(batch))
    logprob = moved(batch, -0.8)
    trainer = trl_trainer("RLOOTrainer", logprob=logprob)
    theirs = trainer.loss(trl_inputs(batch, old_logps=(batch["logprob"] * batch["learned"]).sum(1)))
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(gradient, logprob.grad)
    seen, logged = weighted_means(algorithm, batch, logprob), trainer._metrics["train"]
    assert seen["policy/clip_low"] == pytest.approx(logged["clip_ratio/low_mean"][0])
    assert seen["policy/clip_high"] == pytest.approx(logged["clip_ratio/high_mean"][0])
    assert 0 < seen["policy/clip_low"] != seen["policy/clip_high"] > 0


def slow_loss(algorithm: RLOO, batch: Batch, logprob: list[list[float]]) -> float:
    total = 0.0
    columns = {name: column.tolist() for name, column in batch.columns.items()}
    for row in range(len(batch)):
        tokens = range(int(sum(columns["learned"][row])))
        moves = [logprob[row][t] - columns["logprob"][row][t] for t in tokens]
        ratios = [math.exp(sum(moves))] if algorithm.ratio == "sequence" and moves else [math.exp(m) for m in moves]
        for ratio in ratios:
            advantage = columns["advantage"][row][0]
            clipped = max(1 - algorithm.clip_low, min(1 + algorithm.clip_high, ratio))
            total -= min(ratio * advantage, clipped * advantage)
    return total / len(batch)


@pytest.mark.parametrize("ratio", ["sequence", "token"])
def test_loss_and_gradient_are_those_of_a_loop_in_any_micro_batches(ratio):
    algorithm = RLOO(ratio=ratio, clip_low=0.1, clip_high=0.3)
    batch = algorithm.credit(uneven(torch.float64), 0.3, ALONE)
    logprob = moved(batch).detach()
    loss, gradient = accumulated(algorithm, batch, logprob, 8)
    fixed = logprob.tolist()
    assert loss == pytest.approx(slow_loss(algorithm, batch, fixed), rel=1e-9)
    for row, t in itertools.product(range(8), range(LIMIT)):
        around = []
        for step in (1e-6, -1e-6):
            shifted = [list(values) for values in fixed]
            shifted[row][t] += step
            around.append(slow_loss(algorithm, batch, shifted))
        assert gradient[row, t].item() == pytest.approx((around[0] - around[1]) / 2e-6, abs=1e-6)
    for size in (1, 3):
        part_loss, part_gradient = accumulated(algorithm, batch, logprob, size)
        assert part_loss == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(part_gradient, gradient)


def test_metrics_of_the_step():
    batch = RLOO().credit(uneven(shaped_reward=torch.tensor([1.0, 1, 1, 1, 0, 2, 0, 2])), 0.0, ALONE)
    found = RLOO().metrics(batch, ALONE)
    assert found == {
        "group/zero_std": 0.5,
        "group/reward_std": pytest.approx(0.5 * math.sqrt(4 / 3)),
        "reward/signal": 1.0,
    }


def test_settings():
    assert (RLOORun().samples_per_prompt, RLOORun().update.epochs, RLOORun().kl.coef) == (4, 1, 0.05)
    assert RLOORun.model_validate({"rloo": {"resample": 2}}).algorithm.max_batches == 3
    with pytest.raises(UserError, match="no other response"):
        load(RLOORun, None, ["--samples_per_prompt", "1"])
