"""The effect of patterns on the reward: arithmetic and the difference of two means."""

import numpy as np
import pytest

from cavesson.text.reward_effect import effect_weight, reward_effect


def test_the_effect_in_one_group_is_the_difference_of_the_means() -> None:
    has, reward = np.array([True, True, False, False, False]), np.array([4.0, 6.0, 1.0, 2.0, 3.0])
    centred = reward - 3.2
    found = reward_effect(centred[has].sum(), effect_weight(np.array([2]), np.array([5])), centred @ centred, 5)
    assert found.value == pytest.approx(5 - 2)
    # The residuals of the two means are ±1 and −1, 0, 1; the variance of a difference of means is σ²/2 + σ²/3.
    assert found.error == pytest.approx(np.sqrt(4 / 5 * (1 / 2 + 1 / 3)))
    assert found.in_sd == pytest.approx(3 / np.std(reward))


def test_groups_are_weighted_by_how_well_they_can_be_compared() -> None:
    # Differences 2 in a group of 1 with and 1 without, 5 in one of 2 and 2: weights 1/2 and 1.
    assert effect_weight(np.array([[1, 2], [2, 4]]), np.array([2, 4])).tolist() == [1.5, 0]
    total = 2 * 1 / 2 + 5 * 1
    assert reward_effect(np.array(total), np.array(1.5), 99.0, 6).value == pytest.approx((2 * 0.5 + 5 * 1) / 1.5)


def test_a_pattern_of_all_or_no_responses_has_no_effect_that_could_be_known() -> None:
    assert np.isnan(reward_effect(np.array(0.0), np.array(0.0), 4.0, 4).value)
