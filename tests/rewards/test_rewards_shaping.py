import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.rollout.rewards.settings import ShapingSettings
from cavesson.rollout.rewards.shaping import RunningMoments, Shaping

batches = st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9), min_size=1, max_size=6)


def shape(totals, *, query=None, ended=None, **settings):
    return Shaping(ShapingSettings(**settings))(totals, query, ended or [True] * len(totals))


@given(batches)
def test_moments_over_uneven_batches_are_those_of_all_values(batches):
    moments = RunningMoments()
    for batch in batches:
        moments.update(batch)
    values = np.concatenate([np.array(batch) for batch in batches])
    assert moments.count == len(values)
    assert moments.mean == pytest.approx(values.mean(), abs=1e-9)
    if len(values) > 1 and values.std() > 1e-3:  # below, rounding of the values themselves shows
        assert moments.std == pytest.approx(values.std(ddof=1), rel=1e-6)


def test_a_large_mean_costs_no_precision():
    moments = RunningMoments()
    for value in (1.0, 2.0, 3.0, 4.0):
        moments.update([1e9 + value])
    assert moments.std == pytest.approx(math.sqrt(5 / 3), rel=1e-6)


@pytest.mark.parametrize("values", [[3.0], [3.0, 3.0]])
def test_as_long_as_nothing_varies_the_deviation_is_one(values):
    moments = RunningMoments()
    assert moments.std == 1.0
    moments.update(values)
    assert moments.std == 1.0


@given(batches)
def test_moments_continue_from_their_state(batches):
    whole, resumed = RunningMoments(), RunningMoments()
    for batch in batches:
        whole.update(batch)
        resumed.update(batch)
        resumed = RunningMoments(**resumed.state())
    assert resumed.state() == whole.state()


def test_without_settings_nothing_changes():
    assert shape([1.0, -2.0], ended=[True, False]) == [1.0, -2.0]


def test_the_query_s_own_reward_is_subtracted():
    assert shape([1.0, -2.0], query=[0.5, 3.0], subtract_query=True) == [0.5, -5.0]


def test_scaling_divides_by_the_deviation_and_keeps_the_mean():
    # Deviation of (1, 3) with Bessel's correction: √2.
    assert shape([1.0, 3.0], scale=True) == pytest.approx([1 / math.sqrt(2), 3 / math.sqrt(2)])


def test_normalising_subtracts_the_mean_as_well():
    assert shape([1.0, 3.0], scale=True, normalise=True) == pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)])


def test_scaling_uses_all_rewards_so_far_the_present_ones_included():
    shaping = Shaping(ShapingSettings(scale=True, normalise=True))
    shaping([1.0, 3.0], None, [True] * 2)
    # All so far: 1, 3, 5, 7 with mean 4 and variance 20/3.
    deviation = math.sqrt(20 / 3)
    assert shaping([5.0, 7.0], None, [True] * 2) == pytest.approx([1 / deviation, 3 / deviation])


def test_clipping_is_symmetric():
    assert shape([-5.0, -0.5, 0.25, 9.0], clip=0.5) == [-0.5, -0.5, 0.25, 0.5]


def test_a_missing_end_costs_its_penalty():
    assert shape([1.0, 1.0], ended=[True, False], missing_eos_penalty=0.75) == [1.0, 0.25]


def test_the_order_of_all_steps():
    # Minus the query: 4, −4. Deviation: √32 = 5.657. Divided: ±0.707. Clipped: ±0.5. Then the penalty, unclipped.
    shaped = shape(
        [5.0, -2.0],
        query=[1.0, 2.0],
        ended=[True, False],
        subtract_query=True,
        scale=True,
        clip=0.5,
        missing_eos_penalty=3.0,
    )
    assert shaped == [0.5, -3.5]


def test_moments_are_of_what_is_scaled():
    shaping = Shaping(ShapingSettings(subtract_query=True, scale=True, clip=0.1, missing_eos_penalty=9.0))
    shaping([11.0, 23.0], [10.0, 20.0], [False, False])
    assert shaping.moments.mean == 2.0  # of 1 and 3: after the query, before clip and penalty
