import itertools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from group_helpers import LIMIT, accumulated, full, moved, scores, trl_inputs, trl_trainer, uneven, weighted_means
from torch import Tensor

from dressage.algorithms.grpo import GRPO, GRPORun
from dressage.config import load
from dressage.errors import UserError
from dressage.ops.kl import k1, k3
from dressage.types import Batch

PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "grpo.md"


def grpo(**changes: Any) -> GRPO:
    return GRPO(**{"longest": LIMIT, **changes})


def credited(rewards: list[float], group: list[int], kl_coef: float = 0.0, **changes: Any) -> Tensor:
    """Advantages `[B]` of responses of one token."""
    ones = torch.ones(len(rewards), 1)
    columns = {"shaped_reward": torch.tensor(rewards), "group": torch.tensor(group), "mask": ones}
    return grpo(**changes).credit(Batch(columns), kl_coef)["advantage"][:, 0]


# --- advantages ---


def test_advantages_by_hand():
    rewards, group = [1.0, 2.0, 6.0, 3.0, 5.0], [0, 0, 0, 1, 1]
    centred, spread = [-2, -1, 3, -1, 1], [math.sqrt(7)] * 3 + [math.sqrt(2)] * 2
    expected = [c / (s + 1e-4) for c, s in zip(centred, spread, strict=True)]
    assert credited(rewards, group).tolist() == pytest.approx(expected)
    assert credited(rewards, group, scale="none").tolist() == pytest.approx(centred)
    whole = statistics.stdev(rewards)
    assert credited(rewards, group, scale="batch").tolist() == pytest.approx([c / (whole + 1e-4) for c in centred])
    around_all = [r - 3.4 for r in rewards]
    assert credited(rewards, group, scale="none", baseline="batch").tolist() == pytest.approx(around_all)
    reinforce = credited(rewards, group, scale="batch", baseline="batch")
    assert reinforce.tolist() == pytest.approx([a / (whole + 1e-4) for a in around_all])


@pytest.mark.parametrize("baseline", ["group", "batch"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_teach_nothing(baseline, scale):
    assert credited([0.1] * 7, [2, 2, 2, 2, 2, 2, 8], baseline=baseline, scale=scale).tolist() == [0.0] * 7


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_has_as_much_to_gain_as_to_lose(scale):
    batch = uneven(mask=torch.ones(8, LIMIT))
    advantage = grpo(scale=scale).credit(batch, 0.0)["advantage"]
    assert (advantage == advantage[:, :1]).all()
    assert advantage.abs().max() > 0.5
    assert advantage[:4].sum().item() == pytest.approx(0, abs=1e-5)
    assert advantage[4:].sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_order_of_the_responses_changes_nothing(kl_in):
    order = torch.randperm(8)
    algorithm, batch = grpo(kl_in=kl_in, overlong="penalty", overlong_buffer=3), uneven()
    plain, mixed = algorithm.credit(batch, 0.3), algorithm.credit(batch.take(order), 0.3)
    torch.testing.assert_close(mixed["advantage"], plain["advantage"][order])
    torch.testing.assert_close(mixed["signal"], plain["signal"][order])


def test_advantages_stand_on_tokens_only():
    batch = uneven()
    assert (grpo().credit(batch, 0.0)["advantage"] != 0).equal(batch["mask"] > 0)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_are_those_of_trl(scale):
    utils = pytest.importorskip("trl.trainer.utils")
    rewards = torch.randn(12)
    grouped = rewards.view(3, 4)
    spread = utils.nanstd(grouped, dim=1, keepdim=True) if scale == "group" else utils.nanstd(rewards)
    expected = (grouped - grouped.nanmean(1, keepdim=True)) / (spread + 1e-4)
    ours = credited(rewards.tolist(), [0] * 4 + [1] * 4 + [2] * 4, scale=scale)
    torch.testing.assert_close(ours, expected.flatten())


def test_kl_in_the_reward_by_hand():
    # Two responses of two tokens; Δ = (0.5, −0.25) and (1, 0).
    batch = Batch(
        {
            "mask": torch.ones(2, 2),
            "logprob": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
            "ref_logprob": torch.tensor([[-1.5, -1.75], [-2.0, -1.0]]),
            "shaped_reward": torch.tensor([3.0, 4.0]),
            "group": torch.tensor([0, 0]),
        }
    )
    algorithm = grpo(kl_in="reward", kl_estimator="k1", scale="none")
    after = algorithm.credit(batch, 2.0)
    assert after["signal"].tolist() == [3 - 2 * 0.25, 4 - 2 * 1.0]
    assert after["advantage"].tolist() == [[0.25, 0.25], [-0.25, -0.25]]
    k2 = algorithm.model_copy(update={"kl_estimator": "k2"}).credit(batch, 2.0)
    assert k2["signal"].tolist() == [3 - (0.5**2 + 0.25**2), 4 - 1]
    assert grpo(scale="none").credit(batch, 2.0)["signal"].tolist() == [3, 4]  # it is in the loss


def test_the_overlong_penalty_comes_before_the_groups():
    # Lengths 3, 1, 4, 2 and 4, 0, 2, 3 of at most 4, buffer 2: an eighth of nothing at 2, a half at 3, all at 4.
    batch = uneven(shaped_reward=torch.ones(8))
    algorithm = grpo(overlong="penalty", overlong_buffer=2, scale="none")
    after = algorithm.credit(batch, 0.0)
    assert after["signal"].tolist() == [0.5, 1, 0, 1, 0, 1, 1, 0.5]
    assert after["advantage"][:4, 0].tolist() == [-0.125, 0.375, -0.625, 0.375]
    assert batch["shaped_reward"].tolist() == [1] * 8
    assert algorithm.metrics(after)["reward/overlong_penalty"] == pytest.approx(-3 / 8)


# --- what is averaged over ---


@pytest.mark.parametrize(("normalise", "expected"), [("token", 1 / 4), ("sequence", -1 / 2), ("constant", 1 / 8)])
def test_normalisation_by_hand(normalise, expected):
    # At ratio 1 a token's loss is −Â: one token of −2, three of +1, and at most four tokens per response.
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    batch = Batch({"mask": mask, "logprob": -torch.ones(2, 3), "advantage": torch.tensor([[2.0], [-1.0]]) * mask})
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
    batch = algorithm.credit(uneven(), 0.3)
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
        length = int(sum(columns["mask"][row]))
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
                loss += columns["kl_coef"][row] * penalty[algorithm.kl_estimator]
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
    batch = algorithm.credit(uneven(torch.float64), 0.3)
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


# --- KL in the loss ---


def test_gradient_of_k3_in_the_loss():
    # d/d log π of e^(−Δ) − 1 + Δ is 1 − e^(−Δ), times β of its row, averaged over the 19 tokens.
    batch = uneven(kl_coef=torch.linspace(0.1, 0.8, 8), shaped_reward=torch.zeros(8))
    batch = grpo().credit(batch, 0.0)
    logprob = moved(batch)
    _, gradient = accumulated(grpo(), batch, logprob, 8)
    pull = (1 - (batch["ref_logprob"] - logprob.detach()).exp()) * batch["kl_coef"][:, None] / 19
    torch.testing.assert_close(gradient, pull * batch["mask"])


def test_without_a_reference_there_is_no_kl():
    batch = grpo().credit(uneven(), 0.3)
    alone = Batch({name: column for name, column in batch.columns.items() if name != "ref_logprob"})
    seen = weighted_means(grpo(), alone, moved(batch))
    assert "loss/kl" not in seen
    assert seen["loss/total"] == pytest.approx(seen["loss/policy"])
    both = weighted_means(grpo(), batch, moved(batch))
    assert both["loss/total"] == pytest.approx(both["loss/policy"] + 0.3 * both["loss/kl"])


# --- TRL ---

LOSS_TYPES = {"token": ("dapo", "bnpo"), "sequence": ("grpo",), "constant": ("dr_grpo",)}


@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("normalise", LOSS_TYPES)
@pytest.mark.parametrize("with_kl", [False, True])
def test_loss_and_gradient_are_those_of_trl(normalise, ratio, with_kl):
    algorithm = grpo(normalise=normalise, ratio=ratio, clip_high=0.28)
    batch = algorithm.credit(full(uneven(kl_coef=torch.full((8,), 0.3 * with_kl))), 0.0)
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    for loss_type in LOSS_TYPES[normalise]:
        logprob = moved(batch)
        trainer = trl_trainer(
            "GRPOTrainer",
            logprob=logprob,
            loss_type=loss_type,
            importance_sampling_level=ratio,
            beta=0.3 * with_kl,
        )
        inputs = trl_inputs(batch, old_per_token_logps=batch["logprob"], ref_per_token_logps=batch["ref_logprob"])
        theirs = trainer.loss(inputs)
        theirs.backward()
        assert loss == pytest.approx(theirs.item(), abs=1e-6)
        torch.testing.assert_close(gradient, logprob.grad)
        seen, logged = weighted_means(algorithm, batch, logprob), trainer._metrics["train"]
        if ratio == "token" and normalise != "sequence":  # TRL averages its metrics over tokens in any case
            assert seen["policy/clip_low"] == pytest.approx(logged["clip_ratio/low_mean"][0])
            assert seen["policy/clip_high"] == pytest.approx(logged["clip_ratio/high_mean"][0])
            assert seen["policy/clip_fraction"] == pytest.approx(logged["clip_ratio/region_mean"][0])
            assert 0 < seen["policy/clip_low"] != seen["policy/clip_high"] > 0
            if with_kl:
                assert seen["loss/kl"] == pytest.approx(logged["kl"][0], rel=1e-5)


def test_importance_weights_are_those_of_trl():
    algorithm = grpo(importance=1.2, clip_high=0.28)
    batch = algorithm.credit(full(uneven()), 0.0)
    loss, gradient = accumulated(algorithm, batch, moved(batch), len(batch))
    logprob = moved(batch)
    weight = (batch["logprob"] - batch["sampler_logprob"]).exp().clamp(max=1.2)  # its mode "token_truncate"
    trainer = trl_trainer("GRPOTrainer", logprob=logprob, loss_type="dapo", use_vllm=True, beta=0.3)
    inputs = trl_inputs(
        batch,
        old_per_token_logps=batch["logprob"],
        ref_per_token_logps=batch["ref_logprob"],
        importance_sampling_ratio=weight,
    )
    theirs = trainer.loss(inputs)
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(gradient, logprob.grad)


def test_trls_corrected_kl_has_the_gradient_of_k2_in_the_first_pass():
    algorithm = grpo(kl_estimator="k2")
    batch = algorithm.credit(full(uneven()), 0.0)
    _, gradient = accumulated(algorithm, batch, batch["logprob"], len(batch))
    logprob = batch["logprob"].clone().requires_grad_()
    trainer = trl_trainer(
        "GRPOTrainer", logprob=logprob, loss_type="dapo", beta=0.3, args={"use_bias_correction_kl": True}
    )
    trainer.loss(trl_inputs(batch, ref_per_token_logps=batch["ref_logprob"])).backward()
    torch.testing.assert_close(gradient, logprob.grad)


# --- metrics ---


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_first_ratio_is_one(ratio):
    algorithm = grpo(ratio=ratio)
    batch = algorithm.credit(uneven(), 0.0)
    result = algorithm.loss(scores(batch["logprob"]), batch)
    on_tokens = batch["mask"] > 0
    assert result.means["policy/ratio"][on_tokens].eq(1).all()
    assert result.maxima["policy/ratio_error_max"][on_tokens].eq(0).all()
    torch.testing.assert_close(result.means["loss/policy"][on_tokens], -batch["advantage"][on_tokens])


def test_metrics_of_the_update_by_hand():
    # Ratios ½, 1 and 4 of a good response, and again of a bad one: high clips the first, low the second.
    old = -torch.ones(2, 3)
    ratio = torch.tensor([[0.5, 1.0, 4.0]] * 2)
    batch = Batch({"mask": torch.ones(2, 3), "logprob": old, "advantage": torch.tensor([[1.0] * 3, [-1.0] * 3])})
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
    batch = uneven(shaped_reward=rewards, group=group, logprob=torch.zeros(8, LIMIT), ref_logprob=-torch.ones(8, LIMIT))
    batch = batch.with_columns(sampler_logprob=torch.tensor([-1.0, 0, 0.5, 0]).expand(8, LIMIT))
    algorithm = grpo(kl_in="reward", kl_estimator="k1", importance=2.0)
    found = algorithm.metrics(algorithm.credit(batch, 0.5))
    assert found["group/zero_std"] == 6 / 8
    assert found["group/reward_std"] == pytest.approx(2 / 8 * math.sqrt(2))  # of (0, 2), and 0 of the others
    assert found["reward/signal"] == pytest.approx(6 / 8 - 0.5 * 19 / 8)  # Δ = 1 on each of 19 tokens
    # Seven responses have a first token (weight 2, at the cap), six a second (1), four a third (e^−½), two a fourth.
    assert found["importance/weight_mean"] == pytest.approx((7 * 2 + 6 + 4 * math.exp(-0.5) + 2) / 19)
    assert found["importance/capped"] == pytest.approx(7 / 19)


# --- dynamic sampling, filtering, settings ---


def test_only_groups_that_vary_are_informative():
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert grpo(resample=2).informative(rewards, group).tolist() == [False, False, True, True]
    assert grpo().informative(rewards, group).all()
    assert (grpo().most_batches, grpo(resample=2).most_batches) == (1, 3)


@pytest.mark.parametrize("normalise", ["token", "sequence", "constant"])
def test_filtered_responses_teach_nothing_but_stay_in_their_group(normalise):
    plain, filtered = grpo(normalise=normalise), grpo(normalise=normalise, overlong="filter")
    batch = plain.credit(uneven(), 0.0)
    torch.testing.assert_close(filtered.credit(uneven(), 0.0)["advantage"], batch["advantage"])
    _, gradient = accumulated(filtered, batch, moved(batch), 8)
    assert (gradient.abs().sum(1) > 0).tolist() == [True, True, False, True, False, False, True, True]
    expected = {"token": 3 + 1 + 2 + 2 + 3, "sequence": 5, "constant": 8 * LIMIT}[normalise]
    assert float(filtered.total(batch)) == pytest.approx(expected)


def test_defaults_hold_beside_other_settings_of_their_group():
    run = GRPORun.model_validate({"update": {"mini_batches": 2}, "kl": {"horizon": 500}})
    assert (run.samples_per_prompt, run.update.epochs, run.kl.coef) == (8, 1, 0.0)


def test_the_longest_response_is_that_of_sampling_unless_said():
    def longest(**changes: Any) -> int | None:
        return GRPORun.model_validate(changes).algorithm.longest

    assert longest(sampling={"max_new_tokens": 48}) == 48
    assert longest(sampling={"random_length": (2, 9)}) == 9
    assert longest(sampling={"max_new_tokens": 48}, grpo={"longest": 64}) == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samples_per_prompt", "1"], "nothing to compare"),
        (["--samples_per_prompt", "1", "--grpo.baseline", "batch"], "nothing to compare"),
        (["--grpo.overlong", "penalty"], "overlong_buffer"),
        (["--grpo.overlong_buffer", "4"], "overlong_buffer"),
        (["--grpo.overlong", "penalty", "--grpo.overlong_buffer", "33"], "longer than a response, 32"),
        (["--grpo.longest", "16"], "under the length limit 32"),
    ],
)
def test_mistakes_are_named(flags, words):
    with pytest.raises(UserError, match=words):
        load(GRPORun, None, flags)


def test_reinforce_plus_plus_needs_no_groups():
    flags = ["--samples_per_prompt", "1", "--grpo.baseline", "batch", "--grpo.scale", "batch"]
    run = load(GRPORun, None, [*flags, "--grpo.kl_in", "reward", "--grpo.kl_estimator", "k1", "--kl.coef", "0.01"])
    batch = run.algorithm.credit(uneven(mask=torch.ones(8, LIMIT), group=torch.arange(8)), 0.01)
    spent = 0.01 * k1(batch["logprob"], batch["ref_logprob"]).sum(1)
    signal = batch["shaped_reward"] - spent
    expected = (signal - signal.mean()) / (signal.std() + 1e-4)
    torch.testing.assert_close(batch["advantage"], expected[:, None].expand(8, LIMIT))


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
def test_every_recipe_of_the_page_is_valid(block, tmp_path):
    (tmp_path / "recipe.toml").write_text(block, encoding="utf-8")
    load(GRPORun, tmp_path / "recipe.toml", [])


def test_no_scale_can_be_said_in_a_flag_and_in_a_recipe():
    assert load(GRPORun, None, ["--grpo.scale", "none"]).grpo.scale == "none"
    assert GRPORun.model_validate({"grpo": {"scale": "none"}}).grpo.scale == "none"


def test_groups_of_one_have_no_spread_to_measure():
    batch = grpo(baseline="batch", scale="batch").credit(uneven(group=torch.arange(8)), 0.0)
    assert grpo().metrics(batch).keys() == {"reward/signal"}


def test_k3_is_the_default_and_positive():
    batch = grpo().credit(uneven(), 0.3)
    logprob = moved(batch)
    expected = k3(logprob.detach(), batch["ref_logprob"])
    torch.testing.assert_close(grpo().loss(scores(logprob.detach()), batch).means["loss/kl"], expected)
