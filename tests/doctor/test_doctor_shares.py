"""A share that the doctor tells is one: never below 0 nor above the whole."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from doctor_helpers import Made, check_shares, healthy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import language
from cavesson.findings.words import Percent, Share, number

RUN = healthy("grpo")


def odd(seed: int, drift: float, outliers: float, words: int, fraction: float) -> Made:
    """A run whose responses repeat, whose rewards drift and jump, and that logs fractions in its own way."""
    chance = np.random.default_rng(seed)
    made = copy.deepcopy(RUN)
    shape = made.rows["reward"].shape
    reward = chance.normal(0, 1, shape) + drift * np.arange(shape[0])[:, None]
    reward += np.where(chance.random(shape) < 0.05, outliers * chance.normal(0, 1, shape), 0)
    rows = {
        "reward": reward,
        "shaped_reward": reward,
        "response": np.array([[f"word {n}" for n in line] for line in chance.integers(0, words, shape)], object),
    }
    metrics = {"policy/clip_fraction": fraction * chance.random(shape[0])}
    return replace(made, rows=made.rows | rows, metrics=made.metrics | metrics)


@pytest.mark.slow
@settings(deadline=None, max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.1, 3.0, -50.0]),
    st.sampled_from([0.0, 10.0, 1e6]),
    st.sampled_from([1, 3, 40, 10**6]),
    st.sampled_from([0.5, 1.0, 100.0]),
)
def test_shares_of_odd_runs(tmp_path_factory, seed, drift, outliers, words, fraction):
    data = odd(seed, drift, outliers, words, fraction).data(tmp_path_factory.mktemp("odd") / "run")
    diagnosis = diagnose(data, RULES)
    for rule, found in [*((one.rule, one.reading) for one in diagnosis.findings), *diagnosis.healthy]:
        check_shares(rule, found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("siblings", [True, False], ids=["siblings", "epochs"])
@pytest.mark.parametrize("drift", [0.0, 3.0])
@pytest.mark.parametrize("difficulty", [0.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_what_is_left_among_equals_is_no_matter_of_the_prompt_or_the_step(
    tmp_path, noise: float, difficulty: float, drift: float, siblings: bool
) -> None:
    """Rewards of words, or of chance alone, beside what prompts and steps add to all responses alike.

    Of chance all of the variance is left and of words none, but where no prompt comes twice in a step: its equal
    responses then differ by the drift.
    """
    chance = np.random.default_rng(5)
    made = copy.deepcopy(RUN)
    shape = made.rows["reward"].shape
    prompt = made.rows["group"] if siblings else np.broadcast_to(np.arange(shape[1]), shape)
    word = chance.integers(0, 3, shape)
    reward = noise * chance.normal(0, 1, shape) + (noise == 0) * word
    reward += difficulty * chance.normal(0, 1, 40)[prompt] + drift * np.arange(shape[0])[:, None]
    rows = {
        "group": prompt,
        "prompt": np.array([[f"prompt {n}" for n in line] for line in prompt], object),
        "response": np.array([[f"word {n}" for n in line] for line in word], object),
        "reward": reward,
    }
    rule = next(rule for rule in RULES if rule.name == "reward-is-noise")
    found = rule.statistic(replace(made, rows=made.rows | rows).data(tmp_path / "run"))
    assert found is not None
    if noise or (drift and not siblings):
        assert found.unhealthy and 0.85 < found.seen <= 1
        assert f"{100 * found.seen:.0f} % of the whole" in language("en").texts(rule, found).cause
    else:
        assert not found.unhealthy and found.seen == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_equal_responses_beside_no_others_are_compared_with_those_to_other_prompts(tmp_path) -> None:
    """All siblings say the same: scores that differ among them by 1 and among prompts by 0.5 or 3."""
    chance = np.random.default_rng(5)
    rule = next(rule for rule in RULES if rule.name == "reward-is-noise")
    for difficulty, share in ((0.5, 1 / 1.25), (3.0, 1 / 10)):
        made = copy.deepcopy(RUN)
        prompt = made.rows["group"]
        spread = chance.permutation(np.linspace(-1, 1, 40)) * difficulty * 3**0.5
        reward = chance.normal(0, 1, prompt.shape) + spread[prompt]
        rows = {"response": np.array([[f"to {n}" for n in line] for line in prompt], object), "reward": reward}
        found = rule.statistic(replace(made, rows=made.rows | rows).data(tmp_path / str(difficulty)))
        assert found is not None and found.seen == pytest.approx(share, rel=0.15)
        assert found.unhealthy == (difficulty < 1)


def test_a_relative_number_may_be_more_than_all() -> None:
    assert number(Percent(1.5)) == "150 %" and number(Percent(-0.25)) == "−25 %" and number(Share(0.5)) == "50 %"
