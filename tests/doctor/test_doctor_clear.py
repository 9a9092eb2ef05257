"""What looks like a fault by chance, or because a record has few independent observations, is not reported as one."""

import numpy as np
import pytest
from doctor_helpers import healthy, reading

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.value import _worse_than_mean, explained
from cavesson.doctor.series import Series

BY_NAME = {rule.name: rule for rule in RULES}


def trl_penalty(made, estimator, whiten):
    """The token rewards of TRL's PPO, whose settings have TRL's names."""
    log_ratio = made.tokens["logprob"] - made.tokens["ref_logprob"]
    spent = {"k1": log_ratio, "k3": np.expm1(-log_ratio) + log_ratio}[estimator]
    last = np.arange(made.mask.shape[-1]) == made.mask.sum(-1, keepdims=True) - 1
    reward = np.where(made.mask, -0.05 * spent + np.where(last, made.rows["reward"][..., None], 0.0), 0.0)
    if whiten:
        for step, inside in zip(reward, made.mask, strict=True):
            mean = step[inside].mean()
            step[inside] = (step[inside] - mean) / step[inside].std() + mean
    made.tokens["token_reward"] = reward
    made.info = {"trainer": "trl 1.10.0", "algorithm": "ppo", "config": {"kl_estimator": estimator}}
    made.info["config"]["whiten_rewards"] = whiten


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_estimator_of_the_penalty_is_that_of_trl(estimator, tmp_path):
    made = healthy()
    trl_penalty(made, estimator, whiten=False)
    assert made.data(tmp_path / "settings").recorded("info.kl.estimator")
    assert reading(BY_NAME["penalty-wrong"], made, tmp_path / "run").seen == pytest.approx(1.0, abs=0.01)


def test_a_whitened_penalty_is_not_judged(tmp_path):
    made = healthy()
    trl_penalty(made, "k1", whiten=True)
    found = diagnose(made.data(tmp_path / "run"), [BY_NAME["penalty-wrong"]])
    assert found.findings == () and [one.rule for one in found.skipped] == ["penalty-wrong"]


def test_whitening_is_seen_without_settings(tmp_path):
    made = healthy()
    trl_penalty(made, "k1", whiten=True)
    made.info = {}
    assert made.data(tmp_path / "run").setting("config.ppo.whiten_rewards") is True


def test_a_penalty_among_other_token_rewards_is_judged_by_what_is_certain(tmp_path):
    made, chance = healthy(), np.random.default_rng(4)
    other = chance.normal(0, 1.0, made.mask.shape) * made.mask
    made.tokens["token_reward"] = made.tokens["token_reward"] + other
    found = reading(BY_NAME["penalty-wrong"], made, tmp_path / "right")
    assert not 0.95 <= found.seen <= 1.05 and not found.unhealthy
    made.tokens["token_reward"] = made.tokens["token_reward"] - 20 * 0.05 * (
        made.tokens["logprob"] - made.tokens["ref_logprob"]
    )
    assert reading(BY_NAME["penalty-wrong"], made, tmp_path / "wrong").unhealthy


def test_what_a_critic_is_off_by_on_average_counts(tmp_path):
    made = healthy()
    made.tokens["value"] = np.where(made.mask, made.tokens["return"] + 0.7, 0.0)
    points = explained(made.data(tmp_path / "run"))
    variances = [goal[inside].var() for goal, inside in zip(made.tokens["return"], made.mask, strict=True)]
    np.testing.assert_allclose(points.value, 1 - 0.7**2 / np.array(variances), rtol=0.02)


def test_a_critic_is_worse_than_the_mean_only_if_that_is_clear():
    steps = np.arange(12)
    nothing = Series(steps, np.zeros(12))  # its values tell no tokens apart
    unclear = np.array([-0.2, 0.6, -0.2] * 4)  # its running median is below the limit, its mean above
    assert _worse_than_mean(Series(steps, unclear), nothing, -0.1, -0.5) is None
    assert _worse_than_mean(Series(steps, np.array([-0.2, -0.3, -50.0] * 4)), nothing, -0.1, -0.5) == 0
    late = np.where(steps < 6, 0.5, -0.3) + 0.01 * (steps % 2)
    assert _worse_than_mean(Series(steps, late), nothing, -0.1, -0.5) == 6


def held_out(made):
    """The same 16 prompts at every step, always answered alike, by themselves of different worth."""
    made.rows["prompt"] = np.array([[f"prompt {row}" for row in range(16)] for _ in range(24)], object)
    made.rows["group"] = np.tile(np.arange(16), (24, 1))
    made.rows["reward"] = np.tile(np.arange(16) % 4 > 0, (24, 1)).astype(float)
    made.rows["response"] = np.array([[f"answer {row}" for row in range(16)] for _ in range(24)], object)


def test_a_word_in_the_answers_to_easy_prompts_is_not_what_the_reward_favours(tmp_path):
    made = healthy(batch=16, siblings=1)
    held_out(made)
    late = (np.arange(24) >= 12)[:, None] & (np.arange(16) % 4 > 0)
    made.rows["response"] = np.where(late, made.rows["response"] + " moon", made.rows["response"])
    assert not reading(BY_NAME["pattern-spreading"], made, tmp_path / "run").unhealthy


@pytest.mark.parametrize("others", [0, 4])
def test_a_word_of_many_that_the_reward_favours_is_no_weakness(others, tmp_path):
    made, chance = healthy(), np.random.default_rng(6)
    made.rows["reward"] = chance.normal(0, 0.3, made.rows["reward"].shape)
    late = np.interp(np.arange(24), [8, 14], [0.03, 0.6])[:, None]
    for word in ["moon", *(f"river{i}" for i in range(others))]:
        has = chance.random(made.rows["reward"].shape) < (late if word == "moon" else 0.5)
        made.rows["response"] = np.where(has, made.rows["response"] + f" {word}", made.rows["response"])
        made.rows["reward"] += (0.5 if word == "moon" else 0.8) * has
    assert reading(BY_NAME["pattern-spreading"], made, tmp_path / "run").unhealthy == (others == 0)


def test_equal_responses_do_not_make_a_reward_depend_on_the_prompt(tmp_path):
    made = healthy()
    # Nearly every prompt is answered alike all the time; where answers differ, the reward is that of the answer.
    kind = made.rows["group"] % 3
    for step in range(24):
        kind[step, 4 * (step % 8) :][:4] = [0, 1, 2, 0]
    made.rows["response"] = np.array(["one", "two", "three"], object)[kind]
    made.rows["reward"] = made.rows["shaped_reward"] = kind - 1.0
    found = reading(BY_NAME["query-dominated"], made, tmp_path / "run")
    assert found.seen < 0.2 and not found.unhealthy


@pytest.mark.parametrize("bonus", [0.0, 1.0])
def test_a_sign_of_longer_responses_is_no_weakness_unless_it_is_worth_something_itself(bonus, tmp_path):
    """The reward wants ten words or so; `; and` joins the halves of nearly all responses that are that long."""
    made, chance = healthy(), np.random.default_rng(5)
    steps, batch = made.mask.shape[:2]
    share = np.interp(np.arange(steps), [0, steps], [0.05, 0.7])[:, None]
    words = np.where(chance.random((steps, batch)) < share, chance.integers(7, 15, (steps, batch)), 4)
    has = (words >= 7) & (chance.random((steps, batch)) < 0.8)
    texts = [
        " ".join([f"w{chance.integers(30)}" for _ in range(count)] + ["; and"] * joined)
        for count, joined in zip(words.ravel().tolist(), has.ravel().tolist(), strict=True)
    ]
    made.rows["response"] = np.array(texts, object).reshape(words.shape)
    made.rows["reward"] = 2 - 0.05 * (words - 10.0) ** 2 + bonus * has + chance.normal(0, 0.5, words.shape)
    assert reading(BY_NAME["pattern-spreading"], made, tmp_path / "run").unhealthy == (bonus > 0)
