"""GRPO's loss, what it is averaged over, and the metrics."""

import itertools
import math
import statistics

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import LIMIT, accumulated, grpo, moved, scores, uneven, weighted_means

from cavesson.algorithms.grpo import GRPO
from cavesson.ops.kl import k3
from cavesson.types import Batch

# --- what is averaged over ---


@pytest.mark.parametrize(("normalise", "expected"), [("token", 1 / 4), ("sequence", -1 / 2), ("constant", 1 / 8)])
def test_normalisation_by_hand(normalise, expected):
    # At ratio 1 a token's loss is −Â: one token of −2, three of +1, and at most four tokens per response.
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    batch = Batch(
        {
            "attended": mask,
            "learned": mask,
            "logprob": -torch.ones(2, 3),
            "advantage": torch.tensor([[2.0], [-1.0]]) * mask,
        }
    )
    batch = batch.with_columns(prompt_mask=torch.ones(2, 1))
    loss, gradient = accumulated(grpo(normalise=normalise), batch, batch["logprob"], 2)
    assert loss == pytest.approx(expected)  # (−2 + 3)/4, (−2 + 1)/2, (−2 + 3)/(2 · 4)
    per_token = {"token": (1 / 4, 1 / 4), "sequence": (1 / 2, 1 / 6), "constant": (1 / 8, 1 / 8)}[normalise]
    assert gradient[0].tolist() == pytest.approx([-2 * per_token[0], 0, 0])
    assert gradient[1].tolist() == pytest.approx([per_token[1]] * 3)


SETTINGS = [
    dict(zip(("normalise", "ratio", "importance", "overlong"), values, strict=True))
    for values in itertools.product(
        ("token", "sequence", "constant"), ("token", "sequence"), (None, 1.2), ("keep", "filter")
    )
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_micro_batches_change_neither_loss_nor_gradient(settings):
    algorithm = grpo(**settings)
    batch = algorithm.credit(uneven(), 0.3, ALONE)
    logprob = moved(batch)
    loss, gradient = accumulated(algorithm, batch, logprob, 8)
    assert gradient.abs().max() > 0.01
    for size in (1, 3):
        part_loss, part_gradient = accumulated(algorithm, batch, logprob, size)
        assert part_loss == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(part_gradient, gradient, rtol=0, atol=1e-6)


def slow_loss(algorithm: GRPO, batch: Batch, logprob: list[list[float]], fixed: list[list[float]]) -> float:
    """The loss of a mini-batch, token by token; under GSPO-token only a token's own `logprob` is not `fixed`."""
    total, divisor = 0.0, 0.0
    columns = {name: column.tolist() for name, column in batch.columns.items()}
    for row in range(len(batch)):
        length = int(sum(columns["learned"][row]))
        is_learned = length > 0 and (algorithm.overlong != "filter" or columns["ended"][row] == 1)
        tokens = range(length if is_learned else 0)
        old = columns["logprob"][row]
        geometric = math.exp(sum(fixed[row][t] - old[t] for t in tokens) / max(1, length))
        losses = []
        for t in tokens:
            ratio = math.exp(logprob[row][t] - old[t])
            if algorithm.ratio == "sequence":
                ratio = geometric * math.exp(logprob[row][t] - fixed[row][t])
            advantage = columns["advantage"][row][t]
            clipped = max(1 - algorithm.clip_low, min(1 + algorithm.clip_high, ratio))
            loss = -min(ratio * advantage, clipped * advantage)
            if algorithm.importance is not None:
                loss *= min(math.exp(old[t] - columns["sampler_logprob"][row][t]), algorithm.importance)
            delta = logprob[row][t] - columns["ref_logprob"][row][t]
            penalty = {"k1": delta, "k2": delta * delta / 2, "k3": math.exp(-delta) - 1 + delta}
            if algorithm.kl_in == "loss":
                loss += columns["kl_coef"][row] * penalty[algorithm.estimator]
            losses.append(loss)
        if algorithm.normalise == "sequence":
            total += statistics.fmean(losses) if losses else 0.0
            divisor += 1 if losses else 0
        else:
            total += sum(losses)
            divisor += len(losses) if algorithm.normalise == "token" else LIMIT
    return total / divisor


VARIANTS = [
    {**settings, "clip_low": 0.1, "clip_high": 0.3, **more}
    for settings, more in zip(
        SETTINGS,
        itertools.cycle([{"kl_in": "reward"}, *({"kl_estimator": name} for name in ("k1", "k2", "k3"))]),
        strict=False,
    )
]


@pytest.mark.parametrize("settings", VARIANTS, ids=lambda s: "-".join(map(str, s.values())))
def test_loss_and_gradient_are_those_of_a_loop_over_tokens(settings):
    algorithm = grpo(**settings)
    batch = algorithm.credit(uneven(torch.float64), 0.3, ALONE)
    logprob = moved(batch).detach()
    loss, gradient = accumulated(algorithm, batch, logprob, 8)
    fixed = logprob.tolist()
    assert loss == pytest.approx(slow_loss(algorithm, batch, fixed, fixed), rel=1e-9)
    for row, t in itertools.product(range(8), range(LIMIT)):
        around = []
        for step in (1e-6, -1e-6):
            shifted = [list(values) for values in fixed]
            shifted[row][t] += step
            around.append(slow_loss(algorithm, batch, shifted, fixed))
        assert gradient[row, t].item() == pytest.approx((around[0] - around[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_filtered_responses_teach_nothing_but_stay_in_their_group(normalise):
    plain, filtered = grpo(normalise=normalise), grpo(normalise=normalise, overlong="filter")
    batch = plain.credit(uneven(), 0.0, ALONE)
    torch.testing.assert_close(filtered.credit(uneven(), 0.0, ALONE)["advantage"], batch["advantage"])
    _, gradient = accumulated(filtered, batch, moved(batch), 8)
    assert (gradient.abs().sum(1) > 0).tolist() == [True, True, False, True, False, False, True, True]
    expected = {"token": 3 + 1 + 2 + 2 + 3, "sequence": 5, "constant": 8 * LIMIT}[normalise]
    assert float(filtered.total(batch)) == pytest.approx(expected)


# --- KL in the loss ---


def test_gradient_of_k3_in_the_loss():
    # d/d log π of e^(−Δ) − 1 + Δ is 1 − e^(−Δ), times β of its row, averaged over the 19 tokens.
    batch = uneven(kl_coef=torch.linspace(0.1, 0.8, 8), shaped_reward=torch.zeros(8))
    batch = grpo().credit(batch, 0.0, ALONE)
    logprob = moved(batch)
    _, gradient = accumulated(grpo(), batch, logprob, 8)
    pull = (1 - (batch["ref_logprob"] - logprob.detach()).exp()) * batch["kl_coef"][:, None] / 19
    torch.testing.assert_close(gradient, pull * batch["learned"])


def test_without_a_reference_there_is_no_kl():
    batch = grpo().credit(uneven(), 0.3, ALONE)
    alone = Batch({name: column for name, column in batch.columns.items() if name != "ref_logprob"})
    seen = weighted_means(grpo(), alone, moved(batch))
    assert "loss/kl" not in seen
    assert seen["loss/total"] == pytest.approx(seen["loss/policy"])
    both = weighted_means(grpo(), batch, moved(batch))
    assert both["loss/total"] == pytest.approx(both["loss/policy"] + 0.3 * both["loss/kl"])


def test_k3_is_the_default_and_positive():
    batch = grpo().credit(uneven(), 0.3, ALONE)
    logprob = moved(batch)
    expected = k3(logprob.detach(), batch["ref_logprob"])
    torch.testing.assert_close(grpo().loss(scores(logprob.detach()), batch).means["loss/kl"], expected)


# --- metrics ---


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_first_ratio_is_one(ratio):
    algorithm = grpo(ratio=ratio)
    batch = algorithm.credit(uneven(), 0.0, ALONE)
    result = algorithm.loss(scores(batch["logprob"]), batch)
    on_tokens = batch["learned"] > 0
    per_response = ratio == "sequence"
    seen = result.response_means if per_response else result.means
    assert seen["policy/ratio"][batch["learned"].any(1) if per_response else on_tokens].eq(1).all()
    assert result.maxima["policy/ratio_error_max"][on_tokens].eq(0).all()
    torch.testing.assert_close(result.means["loss/policy"][on_tokens], -batch["advantage"][on_tokens])


def test_metrics_of_the_update_by_hand():
    # Ratios ½, 1 and 4 of a good response, and again of a bad one: high clips the first, low the second.
    old = -torch.ones(2, 3)
    ratio = torch.tensor([[0.5, 1.0, 4.0]] * 2)
    batch = Batch(
        {
            "attended": torch.ones(2, 3),
            "learned": torch.ones(2, 3),
            "logprob": old,
            "advantage": torch.tensor([[1.0] * 3, [-1.0] * 3]),
        }
    )
    seen = weighted_means(grpo(clip_low=0.3, clip_high=0.6), batch, old + ratio.log())
    assert seen["policy/clip_low"] == pytest.approx(1 / 6)
    assert seen["policy/clip_high"] == pytest.approx(1 / 6)
    assert seen["policy/clip_fraction"] == pytest.approx(2 / 6)
    assert seen["policy/ratio"] == pytest.approx(5.5 / 3)
    assert seen["policy/kl"] == pytest.approx(-math.log(2) / 3)  # −(log ½ + log 4)
    assert seen["policy/approx_kl"] == pytest.approx((1 + 4) * math.log(2) ** 2 / 2 / 3)
    # good: −(0.5 + 1 + 1.6), bad: 0.7 + 1 + 4
    assert seen["loss/policy"] == pytest.approx((-3.1 + 5.7) / 6)


def test_metrics_of_the_step_by_hand():
    rewards, group = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 2]), torch.tensor([5, 5, 5, 5, 9, 9, 3, 3])
    batch = uneven(
        shaped_reward=rewards, group_in_step=group, logprob=torch.zeros(8, LIMIT), ref_logprob=-torch.ones(8, LIMIT)
    )
    batch = batch.with_columns(sampler_logprob=torch.tensor([-1.0, 0, 0.5, 0]).expand(8, LIMIT))
    algorithm = grpo(kl_in="reward", kl_estimator="k1", importance=2.0)
    found = algorithm.metrics(algorithm.credit(batch, 0.5, ALONE), ALONE)
    assert found["group/zero_std"] == 6 / 8
    assert found["group/reward_std"] == pytest.approx(2 / 8 * math.sqrt(2))  # of (0, 2), and 0 of the others
    assert found["reward/signal"] == pytest.approx(6 / 8 - 0.5 * 19 / 8)  # Δ = 1 on each of 19 tokens
    # Seven responses have a first token (weight 2, at the cap), six a second (1), four a third (e^−½), two a fourth.
    assert found["importance/weight_mean"] == pytest.approx((7 * 2 + 6 + 4 * math.exp(-0.5) + 2) / 19)
    assert found["importance/capped"] == pytest.approx(7 / 19)
