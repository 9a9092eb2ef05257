"""What looks like a problem where training goes well, or where something else is wrong."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import Made, healthy, log_softmax, reading
from sick import resample

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.diversity import entropy_collapse, entropy_explosion
from cavesson.doctor.rules.group_advantages import group_advantages
from cavesson.doctor.rules.kl import kl_explosion
from cavesson.doctor.rules.mismatch import sampler_mismatch, sampler_stale
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.reward import zero_variance_groups
from cavesson.doctor.rules.system import prompts_exhausted
from cavesson.doctor.rules.temperature import temperature_missing
from cavesson.doctor.rules.value import value_not_fitting
from cavesson.doctor.windows import windows


def test_groups_that_training_leads_to_a_high_reward_are_exhausted_and_not_at_fault(tmp_path):
    """Rewards of 0 to 0.9, then more and more groups of 1; a single response that got 1.5 changes nothing."""
    made = healthy("grpo")
    reward = np.tile(np.linspace(0.0, 0.9, 4), (24, 8, 1))
    for step in range(24):
        reward[step, : step // 3] = 1.0
    reward[5, 7, 0] = 1.5
    made.rows["reward"] = reward.reshape(24, 32)
    assert not reading(zero_variance_groups, made, tmp_path / "groups").unhealthy
    assert reading(prompts_exhausted, made, tmp_path / "prompts").unhealthy


@pytest.mark.parametrize("level", [0.0, 0.45])
def test_equal_rewards_below_those_of_other_groups_teach_nothing(level, tmp_path):
    made = healthy("grpo")
    reward = np.tile(np.linspace(0.0, 0.9, 4), (24, 8, 1)) + np.linspace(0, 1, 24)[:, None, None]
    reward[:, :6] = level
    made.rows["reward"] = reward.reshape(24, 32)
    assert reading(zero_variance_groups, made, tmp_path / "groups").unhealthy
    assert not reading(prompts_exhausted, made, tmp_path / "prompts").unhealthy


def test_a_verifier_that_accepts_nearly_everything_from_the_start_has_not_led_to_it(tmp_path):
    made = healthy("grpo")
    reward = np.ones((24, 8, 4))
    reward[:, 0, 0] = 0.0
    made.rows["reward"] = reward.reshape(24, 32)
    assert reading(zero_variance_groups, made, tmp_path).unhealthy


def test_a_rare_success_does_not_make_failures_a_high_reward(tmp_path):
    """One response in ten succeeds in the end, so that nine in ten rewards are 0 and no lower than the others."""
    made = healthy("grpo")
    reward = np.zeros((24, 8, 4))
    for step in range(24):
        reward[step, : 1 + step // 12, : 1 + step // 18] = 1.0
    made.rows["reward"] = reward.reshape(24, 32)
    assert reading(zero_variance_groups, made, tmp_path / "groups").unhealthy
    assert not reading(prompts_exhausted, made, tmp_path / "prompts").unhealthy


@pytest.mark.parametrize(("first", "sick"), [(0.5, False), (0.0, True)])
def test_scores_that_are_noise_from_the_first_step_do_not_make_the_sampler_old(first, sick, tmp_path):
    """The policy is far from sampler and reference, which are equal: from the start, or more with every update."""
    made, chance = healthy(), np.random.default_rng(4)
    noise = np.linspace(first, 0.5, 24)[:, None, None] * chance.normal(0, 1, made.mask.shape)
    made.tokens["logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, noise, 0)
    made.tokens["sampler_logprob"] = made.tokens["ref_logprob"].copy()
    assert reading(sampler_stale, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize(("start", "sick"), [(2.0, False), (0.9, True)])
def test_an_entropy_that_returns_to_where_it_was_has_not_exploded(start, sick, tmp_path):
    """It falls to 0.9 nats and rises to 1.9; the run began at 2.0, or with a rise from its lowest."""
    made = healthy(steps=64, batch=8)
    level = np.concatenate([np.linspace(start, 0.9, 24), np.linspace(0.9, 1.9, 40)])
    made.tokens["entropy"] = np.where(made.mask, level[:, None, None], 0.0)
    data = made.data(tmp_path)
    found = [one for part in (data, *windows(data)) if (one := entropy_explosion.statistic(part))]
    assert any(one.unhealthy for one in found) == sick


@pytest.mark.parametrize("known", ["all but one", "one step"])
def test_an_entropy_that_falls_while_the_reward_is_learned_has_not_collapsed(known, tmp_path):
    """The reward rises in the first half; one rollout has none, or those of all steps but one."""
    made = healthy()
    made.tokens["entropy"] *= np.geomspace(1, 0.03, 24)[:, None, None]
    noise = made.rows["reward"] - made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = noise + np.minimum(np.arange(24), 12)[:, None]
    if known == "one step":
        made.rows["reward"][1:] = np.nan
    made.rows["reward"][0, 0] = np.nan
    assert reading(entropy_collapse, made, tmp_path).unhealthy == (known == "one step")


@pytest.mark.parametrize(("end", "sick"), [(-1.0, True), (1.0, False)])
def test_a_reward_that_rises_again_after_it_fell_does_not_excuse_a_collapse(end, sick, tmp_path):
    made = healthy()
    made.tokens["entropy"] *= np.geomspace(1, 0.03, 24)[:, None, None]
    noise = made.rows["reward"] - made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = noise + np.interp(np.arange(24), [0, 10, 23], [0, -2, end])[:, None]
    assert reading(entropy_collapse, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_some_advantages_of_a_group_have_the_wrong_sign(share, tmp_path):
    """All other ways in which advantages follow from rewards fail, but not that of their size."""
    made, chance = healthy("grpo"), np.random.default_rng(2)
    made.info["kl"]["place"] = "loss"
    reward = made.rows["reward"].reshape(24, 8, 4)
    advantage = (reward - reward.mean(-1, keepdims=True)) / reward.std(-1, keepdims=True)
    advantage = np.where(chance.random(advantage.shape) < share, -advantage, advantage)
    made.tokens["advantage"] = np.where(made.mask, advantage.reshape(24, 32, 1), 0)
    found = reading(group_advantages, made, tmp_path)
    assert found.unhealthy == (share > 0)
    assert str(found.words["how"]) in ("", ": some have the wrong sign", ": it falls where the reward rises")
    assert (found.words["how"] != "") == (share > 0)


@pytest.mark.parametrize(
    ("known", "off", "sick"),
    [
        (0.9, 1.1, False),  # explains 0.9 − 1.1² = −0.3
        (0.9, 1.5, True),  # −1.35
        (0.0, 0.55, True),  # −0.3, and tells nothing apart
        (0.0, 0.2, False),  # −0.04
    ],
)
def test_a_critic_that_tells_tokens_apart_may_lag_behind_their_mean(known, off, sick, tmp_path):
    """Values with this share of the variance of the returns, which are too low by so many standard deviations."""
    made, chance = healthy(), np.random.default_rng(9)
    goal, mask = made.tokens["return"], made.mask
    value = np.zeros_like(goal)
    for step, inside in enumerate(mask):
        mean, spread = goal[step][inside].mean(), goal[step][inside].std()
        noise = chance.normal(0, spread * (1 - known) ** 0.5, inside.sum()) if known else 0.0
        value[step][inside] = (goal[step][inside] if known else mean) + noise - off * spread
    made.tokens["value"] = value
    found = reading(value_not_fitting, made, tmp_path)
    assert found.unhealthy == sick
    assert found.seen == pytest.approx(known - off**2, abs=0.05)


@pytest.mark.parametrize(("off", "noise", "severity"), [(0.6, 0.0, "note"), (1.5, 0.0, None), (0.0, 0.6, None)])
def test_a_critic_whose_mean_alone_lags_is_a_note(off, noise, severity, tmp_path):
    """A constant that is off by a part of the spread; one that is far off; values that differ for no reason."""
    made, chance = healthy(), np.random.default_rng(9)
    goal, mask = made.tokens["return"], made.mask
    value = np.zeros_like(goal)
    for step, inside in enumerate(mask):
        own = goal[step][inside]
        value[step][inside] = own.mean() + own.std() * (chance.normal(0, noise, own.size) - off)
    made.tokens["value"] = value
    found = reading(value_not_fitting, made, tmp_path)
    assert found.unhealthy and found.severity == severity
    assert found.seen == pytest.approx(-(off**2) - noise**2, abs=0.05)


def test_the_number_is_that_of_the_steps_since_when_the_critic_does_not_fit(tmp_path):
    """For 17 of 24 steps it explains 0.99 of the variance, and then −4: the mean, two standard deviations too low."""
    made = healthy()
    goal, mask = made.tokens["return"], made.mask
    value = np.zeros_like(goal)
    for step, inside in enumerate(mask):
        own = goal[step][inside]
        value[step][inside] = own + 0.1 * own.std() if step < 17 else own.mean() - 2 * own.std()
    made.tokens["value"] = value
    found = reading(value_not_fitting, made, tmp_path)
    assert found.unhealthy and found.since > 12
    assert found.seen == pytest.approx(-4, abs=0.05)


@pytest.mark.parametrize(("noise", "temperature", "sick"), [(0.8, 1.0, False), (0.0, 1.0, False), (0.0, 1.4, True)])
def test_noise_in_the_scores_is_not_a_temperature(noise, temperature, sick, tmp_path):
    """Noise, as of dropout, makes tokens less likely and flattens the slope of the sampler's log-probabilities."""
    made, chance = healthy(batch=64), np.random.default_rng(6)
    resample(made, lambda policy: log_softmax(policy / temperature))
    made.tokens["logprob"] += np.where(made.mask, noise * chance.normal(-0.5, 1, made.mask.shape), 0)
    assert reading(temperature_missing, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize(("changes", "sick"), [(True, False), (False, True)])
def test_another_reward_from_a_step_on_is_not_noise(changes, sick, tmp_path):
    """Equal responses to a prompt, one per step: their rewards differ before and after step 12, or at every step."""
    made, chance = healthy(batch=16, siblings=1), np.random.default_rng(5)
    made.rows["prompt"] = np.array([[f"prompt {row}" for row in range(16)] for _ in range(24)], object)
    made.rows["group"] = np.tile(np.arange(16), (24, 1))
    made.rows["response"] = np.array(
        [[f"answer {(row + step) % 4}" for row in range(16)] for step in range(24)], object
    )
    worth = chance.normal(0, 1, (2, 16, 4))
    reward = np.empty((24, 16))
    for step in range(24):
        answer = (np.arange(16) + step) % 4
        reward[step] = worth[int(step >= 12), np.arange(16), answer] if changes else chance.normal(0, 1, 16)
    made.rows["reward"] = reward
    assert reading(reward_is_noise, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize(("share", "sick"), [(0.03, False), (1.0, True)])
def test_a_few_huge_rewards_are_not_noise(share, sick, tmp_path):
    """Verdicts of equal responses are equal, but for the share of them to which chance adds 50, or chance replaces."""
    made, chance = healthy(batch=64, siblings=8), np.random.default_rng(5)
    answer = chance.integers(0, 3, (24, 64))
    made.rows["response"] = np.array([[f"answer {one}" for one in line] for line in answer], object)
    verdict = (answer == made.rows["group"] % 3).astype(float)
    instead = chance.permuted(verdict, axis=1) if share == 1 else verdict + 50
    made.rows["reward"] = np.where(chance.random(verdict.shape) < share, instead, verdict)
    assert reading(reward_is_noise, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize(("until", "sick"), [(14, False), (18, True), (24, True)])
def test_a_kl_that_has_returned_for_a_third_of_the_run_does_not_explode(until, sick, tmp_path):
    """Two nats per token from step 6 on, until a later step or the end; the reward stays as it was."""
    made, step = healthy(), np.arange(24)
    far = ((step >= 6) & (step < until))[:, None, None]
    made.tokens["logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, np.where(far, 2.0, 0.01), 0)
    made.rows["reward"] = np.tile(made.rows["reward"][0], (24, 1))
    assert reading(kl_explosion, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize(
    ("dtype", "gap", "sick"), [("bfloat16", 0.04, False), ("bfloat16", 0.06, True), ("float32", 0.04, True)]
)
def test_sampler_and_trainer_differ_by_more_in_bfloat16(dtype, gap, sick, tmp_path):
    """e^0.04 is 1.041 and e^0.06 is 1.062; the limit of NeMo RL's guide is 1.05."""
    made = healthy()
    made.info["config"]["model"]["dtype"] = dtype
    sign = np.where(np.random.default_rng(1).random(made.mask.shape) < 0.5, gap, -gap)
    made.tokens["sampler_logprob"] += np.where(made.mask, sign, 0)
    assert reading(sampler_mismatch, made, tmp_path).unhealthy == sick


def causes(made: Made, folder: Path) -> dict[str, tuple[str, ...]]:
    """The consequences of each cause that all rules together find."""
    return {one.rule.name: one.explains for one in diagnose(made.data(folder), RULES).causes}


def test_a_reward_that_falls_follows_from_wrong_token_rewards(tmp_path):
    """From the first step on, the token rewards of a third of the responses lack half of the reward."""
    made = healthy()
    made.rows["reward"] -= np.linspace(0, 3, 24)[:, None]
    made.settle()
    assert "reward-falls" in causes(made, tmp_path / "right")
    last = np.arange(made.mask.shape[-1]) == made.mask.sum(-1, keepdims=True) - 1
    made.tokens["token_reward"] -= (
        np.where(last, made.rows["reward"][..., None] / 2, 0) * (np.arange(32) % 3 == 0)[:, None]
    )
    found = causes(made, tmp_path / "wrong")
    assert "reward-falls" not in found
    assert "reward-falls" in found["reward-accounting"]


def test_a_verifier_that_returns_one_value_may_follow_from_a_policy_that_was_destroyed(tmp_path):
    """Updates are much too large from step 2 on; all responses get the lowest reward from step 8 on."""
    made = healthy()
    made.rows["reward"][8:] = made.rows["reward"].min() - 1.0
    made.settle()
    assert "verifier-dead" in causes(made, tmp_path / "alone")
    made.metrics["policy/approx_kl"][2:] = 3.0
    found = causes(made, tmp_path / "destroyed")
    assert "verifier-dead" not in found
    assert "verifier-dead" in found["update-kl-large"]
