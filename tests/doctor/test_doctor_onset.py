"""The step at which a problem began, and its interval, on series of which the truth is known."""

import numpy as np
import pytest
from doctor_helpers import healthy
from scipy import stats

from cavesson.doctor.onset import CONFIDENCE, of_events, onset, with_onset
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rules.reward import reward_falls
from cavesson.doctor.series import Series

SEEDS = 120
MIN_COVERED = int(stats.binom.ppf(0.001, SEEDS, CONFIDENCE))
"""With a coverage of 90 %, fewer intervals than this hold the truth once in a thousand times."""


def noise(chance: np.random.Generator, count: int, correlation: float) -> np.ndarray:
    """Return normal noise of variance 1 with a correlation of neighbouring values."""
    values = chance.normal(size=count)
    for i in range(1, count):
        values[i] = correlation * values[i - 1] + np.sqrt(1 - correlation**2) * values[i]
    return values


def changed(steps: np.ndarray, at: int, length: int, size: float) -> np.ndarray:
    """Return a series that is 0 up to step ``at`` and then changes by ``size`` along a line over ``length`` steps."""
    return size * np.clip((steps - at + 1) / length, 0, 1)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("count", [16, 32, 100])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
@pytest.mark.parametrize("length", ["jump", "four", "third"])
@pytest.mark.parametrize("size", [1.5, 4.0, 10.0])
def test_the_interval_holds_the_truth_in_nine_of_ten_cases(count, correlation, length, size):
    chance = np.random.default_rng(0)
    steps, span = np.arange(count), {"jump": 1, "four": 4, "third": count // 3}[length]
    covered = 0
    for seed in range(SEEDS):
        at = int(chance.integers(count // 8, count - span - count // 8))
        sign = 1 if seed % 2 else -1
        values = sign * changed(steps, at, span, size) + noise(chance, count, correlation)
        found = onset(Series(steps, values), rising=sign > 0)
        assert found.low <= found.step <= found.high
        covered += found.low <= at <= found.high
    assert covered >= MIN_COVERED


@pytest.mark.parametrize(("length", "most"), [(1, 0.5), (30, 5.0)])
def test_the_beginning_is_found_within_five_steps_in_the_median(length, most):
    chance = np.random.default_rng(1)
    steps = np.arange(100)
    ats = chance.integers(15, 55, SEEDS)
    found = [onset(Series(steps, changed(steps, at, length, 4.0) + noise(chance, 100, 0.0)), True) for at in ats]
    assert np.median([abs(one.step - at) for one, at in zip(found, ats, strict=True)]) <= most
    assert np.median([one.high - one.low for one in found]) < 15  # the interval is not wide for nothing


def test_a_jump_without_noise_is_found_exactly():
    steps = np.arange(5, 45)
    found = onset(Series(steps, np.where(steps >= 30, 2.0, 1.0)), rising=True)
    assert (found.step, found.low, found.high) == (30, 30, 30)
    assert (found.before, found.after) == (1.0, 2.0)


def test_a_jump_between_steps_that_were_looked_at_lies_between_them():
    """Of every tenth step, the first one after the jump is 160, so it came after 150."""
    steps = np.arange(0, 300, 10)
    found = onset(Series(steps, np.where(steps > 153, 1.0, 0.0)), rising=True)
    assert (found.step, found.low, found.high) == (155, 151, 160)


def test_a_single_outlier_does_not_move_the_beginning():
    chance = np.random.default_rng(2)
    steps = np.arange(60)
    values = changed(steps, 40, 1, 5.0) + noise(chance, 60, 0.0)
    values[12] = 1e6
    assert abs(onset(Series(steps, values), rising=True).step - 40) <= 1


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_events_that_occur_by_chance_began_in_the_interval_in_nine_of_ten_cases(rate):
    chance = np.random.default_rng(3)
    steps, at = np.arange(100), 40
    events = [steps[(steps >= at) & (chance.random(100) < rate)] for _ in range(400)]
    found = [of_events(Series(steps, np.zeros(100)), some) for some in events if len(some)]
    assert stats.binom.cdf(sum(low <= at <= high for low, high in found), len(found), 0.9) > 0.001


def test_a_problem_has_begun_by_the_step_at_which_its_rule_sees_it(tmp_path):
    """The reward falls faster and faster, and is far below its start long before it falls fastest."""
    steps = np.arange(50)[:, None]
    made = healthy(steps=50)
    made.rows["reward"] = np.random.default_rng(0).normal(0, 0.5, (50, 32)) - 5.5 * np.clip(steps / 35, 0, 1) ** 1.5
    data = made.data(tmp_path / "run")
    found = reward_falls.statistic(data)
    low, high = with_onset(found, data).between
    assert low <= high <= found.since


def test_the_first_step_of_a_window_is_not_a_step_at_which_a_rule_sees_a_problem(tmp_path):
    """The rule says of the whole window that something is wrong in it; the curve says from where."""
    made = healthy(steps=64)
    made.metrics["kl/objective"] = np.where(np.arange(64) < 54, 1.0, 3.0) + np.random.default_rng(0).normal(0, 0.05, 64)
    data = made.data(tmp_path / "run")
    found = Reading(0.5, True, 48, curve=Curve(data.metric("kl/objective")), window=(48, 63))
    low, high = with_onset(found, data).between
    assert low <= 54 <= high
