"""GRPO's advantages, and what its settings mean."""

import itertools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import ALONE
from group_helpers import LIMIT, grpo, uneven
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cavesson.algorithms.grpo import GRPORun
from cavesson.config import load
from cavesson.errors import UserError
from cavesson.ops.kl import k1
from cavesson.types import Batch

SCALES = ["group", "batch", "none"]
PAGE = Path(__file__).parents[2] / "docs" / "algorithms" / "grpo.md"


def credited(rewards: list[float], group: list[int], kl_coef: float = 0.0, **changes: Any) -> Tensor:
    """Advantages `[B]` of responses of one token."""
    ones = torch.ones(len(rewards), 1)
    columns = {
        "shaped_reward": torch.tensor(rewards),
        "group_in_step": torch.tensor(group),
        "attended": ones,
        "learned": ones,
    }
    return grpo(**changes).credit(Batch(columns), kl_coef, ALONE)["advantage"][:, 0]


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


@pytest.mark.parametrize(("baseline", "scale"), [*itertools.product(["group", "batch"], SCALES), ("group", "mean")])
def test_equal_rewards_teach_nothing(baseline, scale):
    assert credited([0.1] * 7, [2, 2, 2, 2, 2, 2, 8], baseline=baseline, scale=scale).tolist() == [0.0] * 7


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_has_as_much_to_gain_as_to_lose(scale):
    batch = uneven(attended=torch.ones(8, LIMIT), learned=torch.ones(8, LIMIT))
    advantage = grpo(scale=scale).credit(batch, 0.0, ALONE)["advantage"]
    assert (advantage == advantage[:, :1]).all()
    assert advantage.abs().max() > 0.5
    assert advantage[:4].sum().item() == pytest.approx(0, abs=1e-5)
    assert advantage[4:].sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_order_of_the_responses_changes_nothing(kl_in):
    order = torch.randperm(8)
    algorithm, batch = grpo(kl_in=kl_in, overlong="penalty", overlong_buffer=3), uneven()
    plain, mixed = algorithm.credit(batch, 0.3, ALONE), algorithm.credit(batch.take(order), 0.3, ALONE)
    torch.testing.assert_close(mixed["advantage"], plain["advantage"][order])
    torch.testing.assert_close(mixed["signal"], plain["signal"][order])


def test_advantages_stand_on_tokens_only():
    batch = uneven()
    assert (grpo().credit(batch, 0.0, ALONE)["advantage"] != 0).equal(batch["learned"] > 0)


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
            "attended": torch.ones(2, 2),
            "learned": torch.ones(2, 2),
            "logprob": torch.tensor([[-1.0, -2.0], [-1.0, -1.0]]),
            "ref_logprob": torch.tensor([[-1.5, -1.75], [-2.0, -1.0]]),
            "shaped_reward": torch.tensor([3.0, 4.0]),
            "group_in_step": torch.tensor([0, 0]),
        }
    )
    algorithm = grpo(kl_in="reward", kl_estimator="k1", scale="none")
    after = algorithm.credit(batch, 2.0, ALONE)
    assert after["signal"].tolist() == [3 - 2 * 0.25, 4 - 2 * 1.0]
    assert after["advantage"].tolist() == [[0.25, 0.25], [-0.25, -0.25]]
    k2 = algorithm.model_copy(update={"kl_estimator": "k2"}).credit(batch, 2.0, ALONE)
    assert k2["signal"].tolist() == [3 - (0.5**2 + 0.25**2), 4 - 1]
    assert grpo(scale="none").credit(batch, 2.0, ALONE)["signal"].tolist() == [3, 4]  # it is in the loss


def test_the_overlong_penalty_comes_before_the_groups():
    # Lengths 3, 1, 4, 2 and 4, 0, 2, 3 of at most 4, buffer 2: an eighth of nothing at 2, a half at 3, all at 4.
    batch = uneven(shaped_reward=torch.ones(8))
    algorithm = grpo(overlong="penalty", overlong_buffer=2, scale="none")
    after = algorithm.credit(batch, 0.0, ALONE)
    assert after["signal"].tolist() == [0.5, 1, 0, 1, 0, 1, 1, 0.5]
    assert after["advantage"][:4, 0].tolist() == [-0.125, 0.375, -0.625, 0.375]
    assert batch["shaped_reward"].tolist() == [1] * 8
    assert algorithm.metrics(after, ALONE)["reward/overlong_penalty"] == pytest.approx(-3 / 8)


# --- MaxRL ---


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.integers(0, 2)), min_size=1, max_size=10))
def test_maxrl_as_a_loop_over_groups_says(pairs):
    rewards, group = map(list, zip(*pairs, strict=True))
    expected = [0.0] * len(pairs)
    for name in set(group):
        members = [i for i, other in enumerate(group) if other == name]
        mean = math.fsum(rewards[i] for i in members) / len(members)
        for i in members if mean > 0 else []:
            expected[i] = (rewards[i] - mean) / mean
    assert credited(rewards, group, scale="mean").tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_expected_gradient_of_maxrl_is_that_of_the_pass_at_k_up_to_the_size_of_the_group_less_one(size):
    """By enumeration: all groups of a policy with three responses, two of which are right."""
    logits, right = torch.tensor([0.3, -0.9, 0.6], dtype=torch.float64, requires_grad=True), [0.0, 1.0, 1.0]
    logprob = logits.log_softmax(0)
    scores = [torch.autograd.grad(one, logits, retain_graph=True)[0] for one in logprob]
    expected = torch.zeros(3, dtype=torch.float64)
    for drawn in itertools.product(range(3), repeat=size):
        advantage = credited([right[i] for i in drawn], [0] * size, scale="mean").tolist()
        estimate = sum(a * scores[i] for a, i in zip(advantage, drawn, strict=True)) / size
        expected += logprob[list(drawn)].sum().exp().item() * estimate
    passes = logprob.exp() @ torch.tensor(right, dtype=torch.float64)
    objective = sum(((1 - (1 - passes) ** k) / k for k in range(1, size)), 0 * passes)
    torch.testing.assert_close(expected, torch.autograd.grad(objective, logits)[0], atol=1e-6, rtol=1e-6)


def test_the_unit_of_the_reward_does_not_matter_to_maxrl():
    rewards, group = [0.0, 0.2, 1.0, 0.5, 0.5, 2.0], [0, 0, 0, 1, 1, 1]
    ten_times = credited([10 * one for one in rewards], group, scale="mean")
    torch.testing.assert_close(ten_times, credited(rewards, group, scale="mean"))


def test_maxrl_refuses_rewards_below_0():
    with pytest.raises(UserError, match=r'of 0 or more, and a response got -0\.5: .*grpo\.scale to "group"'):
        credited([1.0, -0.5], [0, 0], scale="mean")


# --- dynamic sampling, settings ---


def test_only_groups_that_vary_are_informative():
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert grpo(resample=2).informative(rewards, group).tolist() == [False, False, True, True]
    assert grpo().informative(rewards, group).all()
    assert (grpo().max_batches, grpo(resample=2).max_batches) == (1, 3)


def test_defaults_hold_beside_other_settings_of_their_group():
    run = GRPORun.model_validate({"update": {"mini_batches": 2}, "kl": {}})
    assert (run.samples_per_prompt, run.update.epochs, run.kl.coef) == (8, 1, 0.0)


def test_the_longest_response_is_that_of_sampling_unless_said():
    def longest(**changes: Any) -> int | None:
        return GRPORun.model_validate(changes).algorithm.longest

    assert longest(sampling={"max_new_tokens": 48}) == 48
    assert longest(sampling={"random_length": (2, 9)}) == 9
    assert longest(sampling={"max_new_tokens": 48}, grpo={"longest": 64, "normalise": "constant"}) == 64


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--samples_per_prompt", "1"], "nothing to compare"),
        (["--samples_per_prompt", "1", "--grpo.baseline", "batch"], "nothing to compare"),
        (["--grpo.overlong", "penalty"], "overlong_buffer"),
        (["--grpo.overlong_buffer", "4"], "overlong_buffer"),
        (["--grpo.overlong", "penalty", "--grpo.overlong_buffer", "33"], "more than the longest response, 32"),
        (["--grpo.longest", "16"], "less than the sampling length limit 32"),
        (["--grpo.scale", "mean", "--grpo.baseline", "batch"], "remove grpo.baseline"),
        (["--grpo.scale", "mean", "--grpo.kl_in", "reward", "--kl.coef", "0.1"], 'grpo.kl_in "reward" lowers them'),
        (["--grpo.scale", "mean", "--grpo.overlong", "penalty", "--grpo.overlong_buffer", "4"], 'penalty" lowers'),
        (["--grpo.scale", "mean", "--shaping.subtract_query"], "shaping.subtract_query lowers"),
        (["--grpo.scale", "mean", "--shaping.scale", "--shaping.normalise"], "shaping.normalise lowers"),
        (["--grpo.scale", "mean", "--shaping.missing_eos_penalty", "1"], "missing_eos_penalty lowers"),
        (["--grpo.scale", "mean", "--shaping.scale"], "shaping.scale has no effect"),
    ],
)
def test_mistakes_are_named(flags, words):
    with pytest.raises(UserError, match=words):
        load(GRPORun, None, flags)


def test_reinforce_plus_plus_needs_no_groups():
    flags = ["--samples_per_prompt", "1", "--grpo.baseline", "batch", "--grpo.scale", "batch"]
    run = load(GRPORun, None, [*flags, "--grpo.kl_in", "reward", "--grpo.kl_estimator", "k1", "--kl.coef", "0.01"])
    batch = run.algorithm.credit(
        uneven(attended=torch.ones(8, LIMIT), learned=torch.ones(8, LIMIT), group_in_step=torch.arange(8)), 0.01, ALONE
    )
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
    batch = grpo(baseline="batch", scale="batch").credit(uneven(group_in_step=torch.arange(8)), 0.0, ALONE)
    assert grpo().metrics(batch, ALONE).keys() == {"reward/signal"}
