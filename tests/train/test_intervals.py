import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cavesson.ops.intervals import Interval, mean_interval, share_interval, twin_correlation

Z = 1.959963984540054


def bounds(interval: Interval | None) -> list[float]:
    assert interval is not None
    return [interval.mean, interval.low, interval.high]


def test_one_success_in_one_trial():
    # The share p is excluded where |1 − p| > z·√(p·(1 − p)): at 1 − p = z²·p.
    assert bounds(share_interval(1, 1)) == pytest.approx([1, 1 / (1 + Z**2), 1])
    assert bounds(share_interval(0, 1)) == pytest.approx([0, 0, 1 - 1 / (1 + Z**2)])


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_wilson_as_in_scipy(trials, data):
    successes = data.draw(st.integers(0, trials))
    expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    assert bounds(share_interval(successes, trials)) == pytest.approx(
        [successes / trials, expected.low, expected.high], abs=1e-12
    )


@settings(deadline=None)
@given(st.integers(1, 300), st.data())
def test_half_successes_have_the_bounds_that_wilson_asks_for(trials, data):
    share = (data.draw(st.integers(0, trials - 1)) + 0.5) / trials
    interval = share_interval(share * trials, trials)
    for p in (interval.low, interval.high):
        assert (p - share) ** 2 == pytest.approx(Z**2 * p * (1 - p) / trials, abs=1e-12)
    assert 0 <= interval.low < share < interval.high <= 1


def test_groups_count_as_one():
    # Means 2 and 6 of the groups: 4 ± t · √8 / √2, where t is the quantile of the Cauchy distribution.
    t = math.tan(math.pi * 0.475)
    assert bounds(mean_interval([1, 3, 5, 7], [8, 8, 3, 3])) == pytest.approx([4, 4 - 2 * t, 4 + 2 * t])
    assert bounds(mean_interval([1, 5, 3, 7], [8, 3, 8, 3])) == pytest.approx([4, 4 - 2 * t, 4 + 2 * t])


@settings(deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=2, max_size=30).filter(lambda values: len(set(values)) > 1))
def test_the_interval_of_a_mean_as_in_scipy(values):
    expected = stats.t.interval(0.95, len(values) - 1, sum(values) / len(values), stats.sem(values))
    assert bounds(mean_interval(values, range(len(values))))[1:] == pytest.approx(expected, abs=1e-12)


def test_one_group_says_nothing_about_others():
    interval = mean_interval([1, 3], [0, 0])
    assert interval.mean == 2
    assert math.isnan(interval.low)
    assert math.isnan(interval.high)


numbers = st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=2, max_size=30)


@settings(deadline=None)
@given(numbers)
def test_correlation_of_twins_by_analysis_of_variance(pairs):
    first, second = zip(*pairs, strict=True)
    within = sum((a - b) ** 2 / 2 for a, b in pairs)
    if len({*first, *second}) == 1:
        assert twin_correlation(first, second) is None
    elif not within:
        assert bounds(twin_correlation(first, second)) == [1, 1, 1]
    else:
        f = stats.f_oneway(*pairs).statistic
        interval = twin_correlation(first, second)
        assert interval is not None
        assert interval.mean == pytest.approx((f - 1) / (f + 1), abs=1e-9)
        assert -1 <= interval.low <= interval.mean <= interval.high <= 1


def test_interval_of_the_correlation_is_near_the_exact_one():
    # 60 pairs a ± b: exact is what the quantiles of F say.
    first = [math.sin(7 * i) + 0.6 * math.sin(13 * i) for i in range(60)]
    second = [math.sin(7 * i) - 0.6 * math.sin(13 * i) for i in range(60)]
    f = stats.f_oneway(*zip(first, second, strict=True)).statistic
    exact = [f / stats.f(59, 60).ppf(level) for level in (0.975, 0.025)]
    interval = twin_correlation(first, second)
    assert interval is not None
    assert [interval.low, interval.high] == pytest.approx([(x - 1) / (x + 1) for x in exact], abs=0.01)
    assert interval.low < 0.5 < interval.high


def test_twins_that_are_opposites():
    assert bounds(twin_correlation([1.0, -2.0, 5.0], [-1.0, 2.0, -5.0])) == [-1, -1, -1]


def test_one_pair_has_no_correlation():
    assert twin_correlation([1.0], [2.0]) is None
    assert twin_correlation([], []) is None
