import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cavesson.ops.intervals import (
    Interval,
    change,
    mean_interval,
    mean_interval_of_sums,
    proportion_interval,
    share_interval,
    share_interval_of_counts,
    twin_correlation,
)

Counts = np.ndarray[Any, np.dtype[Any]]


def bounds(interval: Interval | None) -> list[float | None]:
    assert interval is not None
    return [interval.mean, interval.low, interval.high]


def clopper_pearson(successes: float, trials: float) -> list[float]:
    low = stats.beta.ppf(0.025, successes, trials - successes + 1) if successes else 0.0
    high = stats.beta.ppf(0.975, successes + 1, trials - successes) if successes < trials else 1.0
    return [successes / trials, low, high]


@pytest.mark.parametrize(("successes", "trials"), [(0, 2), (2, 2), (4, 8), (24, 24), (0, 300), (150, 300)])
def test_the_share_of_single_responses_as_in_scipy(successes: int, trials: int) -> None:
    """As many failures as successes deviate by as much, so that the variance is as certain as it can be."""
    values = [1] * successes + [0] * (trials - successes)
    exact = stats.binomtest(successes, trials).proportion_ci(method="exact")
    found = bounds(share_interval(values, range(trials)))
    assert found == pytest.approx([successes / trials, exact.low, exact.high])
    assert found == pytest.approx(clopper_pearson(successes, trials))


@pytest.mark.parametrize(("right", "prompts", "samples"), [(2, 4, 2), (6, 6, 4), (0, 3, 8), (10, 20, 3)])
def test_responses_that_are_alike_count_as_one(right: int, prompts: int, samples: int) -> None:
    values = [float(prompt < right) for prompt in range(prompts) for _ in range(samples)]
    groups = [prompt for prompt in range(prompts) for _ in range(samples)]
    assert bounds(share_interval(values, groups)) == pytest.approx(clopper_pearson(right, prompts))


def test_a_long_prompt_counts_as_one_too() -> None:
    """Kish's number of prompts: (5 + 1 + 1 + 1)² / (25 + 1 + 1 + 1)."""
    assert bounds(share_interval([1] * 8, [0] * 5 + [1, 2, 3])) == pytest.approx(clopper_pearson(64 / 28, 64 / 28))


def test_one_prompt_says_next_to_nothing_about_others() -> None:
    # One trial: excluded are the shares of which a success has a probability below 2.5 %.
    assert bounds(share_interval([1, 1, 1], [4, 4, 4])) == pytest.approx([1, 0.025, 1])
    assert bounds(share_interval([0], [0])) == pytest.approx([0, 0, 0.975])


def test_the_trials_that_responses_are_worth() -> None:
    """Of 40 prompts, 20 have 2 of 4 right, and 10 each 4 and none.

    The mean is 1/2. Half of the prompts deviate by 1/2 and the others not at all, so 20 count: the variance of the mean
    is 20 · (1/4) / (40 · 39), and 20 is the number of degrees of freedom, instead of the 159 of single responses.
    """
    right = [1, 1, 0, 0] * 20 + [1] * 40 + [0] * 40
    trials = 0.25 / (20 / 4 / (40 * 39)) * (stats.t.ppf(0.975, 159) / stats.t.ppf(0.975, 20)) ** 2
    assert 40 < trials < 160
    assert bounds(share_interval(right, np.repeat(np.arange(40), 4).tolist())) == pytest.approx(
        clopper_pearson(trials / 2, trials)
    )


def shares(generator: np.random.Generator, mean: float, alike: float, size: tuple[int, int]) -> Counts:
    """Draw the probabilities of prompts, from equal ones (0) to those that are always or never solved (1)."""
    if alike in (0, 1):
        return np.where(generator.random(size) < mean, 1.0, 0.0) if alike else np.full(size, mean)
    rest = (1 - alike) / alike
    return generator.beta(mean * rest, (1 - mean) * rest, size)


def coverage(prompts: int, samples: int, mean: float, alike: float, runs: int) -> float:
    """Return how often the interval contains the mean; prompts vary in difficulty (a beta distribution)."""
    generator = np.random.default_rng([prompts, samples, round(1000 * mean), round(1000 * alike)])
    right = generator.binomial(samples, shares(generator, mean, alike, (runs, prompts)))
    kinds, times = np.unique(np.sort(right, axis=1), axis=0, return_counts=True)  # the order does not matter
    groups = np.repeat(np.arange(prompts), samples).tolist()
    inside = 0
    for kind, count in zip(kinds, times.tolist(), strict=True):
        interval = share_interval((np.arange(samples) < kind[:, None]).astype(int).ravel().tolist(), groups)
        assert interval.low is not None and interval.high is not None and 0 <= interval.low <= interval.high <= 1
        inside += count * (interval.low <= mean <= interval.high)
    return inside / runs


# The least, 0.93, with two standard errors of a coverage that is measured in so many runs.
def least(runs: int) -> float:
    return 0.93 - 2 * (0.93 * 0.07 / runs) ** 0.5


@pytest.mark.parametrize(("prompts", "samples"), [(3, 1), (3, 8), (10, 4), (24, 1), (50, 8)])
def test_the_interval_contains_the_accuracy_as_often_as_it_says(prompts: int, samples: int) -> None:
    found = {
        (mean, alike): coverage(prompts, samples, mean, alike, 150)
        for mean in (0.02, 0.1, 0.5, 0.95)
        for alike in (0, 0.3, 0.6, 1)
    }
    assert {case: share for case, share in found.items() if share < least(150)} == {}
    assert np.mean(list(found.values())) > 0.94


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [3, 4, 5, 8, 12, 20, 30, 50, 100])
def test_the_interval_contains_all_accuracies_as_often_as_it_says(prompts: int) -> None:
    found = {
        (samples, mean, alike): coverage(prompts, samples, mean, alike, 1000)
        for samples in (1, 2, 4, 8)
        for mean in (0.02, 0.05, 0.1, 0.25, 0.5, 0.7, 0.98)
        for alike in (0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.9, 1)
    }
    assert {case: share for case, share in found.items() if share < least(1000)} == {}


def test_more_responses_make_the_interval_narrower() -> None:
    """Prompts of equal difficulty: with 8 responses each it is far narrower than with one, as of 8 times as many."""
    generator = np.random.default_rng(0)
    right = (generator.random((40, 8)) < 0.6).astype(int)
    several = share_interval(right.ravel().tolist(), np.repeat(np.arange(40), 8).tolist())
    alone = share_interval(right[:, 0].tolist(), range(40))
    exact = clopper_pearson(float(right.sum()), right.size)
    assert several.high - several.low < 0.5 * (alone.high - alone.low)
    assert several.high - several.low == pytest.approx(exact[2] - exact[1], rel=0.25)


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


@pytest.mark.parametrize(("values", "groups"), [([1, 3], [0, 0]), ([5, 5, 5], [0, 1, 2]), ([1, 3, 3, 1], [0, 0, 1, 1])])
def test_prompts_that_do_not_differ_say_nothing_about_others(values: list[int], groups: list[int]) -> None:
    interval = mean_interval(values, groups)
    assert bounds(interval) == [sum(values) / len(values), None, None]
    assert interval.sign == 0


@pytest.mark.parametrize(("low", "high", "sign"), [(0.1, 0.2, 1), (-0.1, 0.2, 0), (-0.3, -0.1, -1), (0.0, 0.2, 0)])
def test_a_sign_is_known_only_if_the_interval_excludes_zero(low: float, high: float, sign: int) -> None:
    assert Interval((low + high) / 2, low, high).sign == sign


def test_the_change_of_a_series_as_in_scipy() -> None:
    values = [0.1, 0.3, 0.2, 9.0, 9.0, -9.0, 0.6, 0.9, 0.5]
    expected = stats.ttest_ind(values[6:], values[:3], equal_var=False).confidence_interval(0.95)
    assert bounds(change(values)) == pytest.approx([2 / 3 - 0.2, expected.low, expected.high])
    assert change(values).sign == 1
    assert bounds(change(values[:8])) == pytest.approx([0.8, None, None])
    assert bounds(change([2.0] * 9)) == [0.0, None, None]


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


@pytest.mark.parametrize(("wins", "trials"), [(0, 1), (1, 1), (0, 9), (4, 9), (9, 9), (250, 1000)])
def test_a_share_of_independent_trials_has_the_exact_interval(wins, trials):
    found = proportion_interval(wins, trials)
    assert found.mean == wins / trials
    exact = stats.binomtest(wins, trials).proportion_ci(method="exact")
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high))


GROUPED = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12)


@settings(max_examples=100)
@given(GROUPED)
def test_sums_and_counts_of_groups_say_as_much_as_their_values(members: list[list[int]]) -> None:
    values = [value for group in members for value in group]
    groups = [number for number, group in enumerate(members) for _ in group]
    wins, sizes = [sum(group) for group in members], [len(group) for group in members]
    assert bounds(share_interval_of_counts(wins, sizes)) == pytest.approx(bounds(share_interval(values, groups)))
    of_sums = mean_interval_of_sums(np.array(wins, float), np.array(sizes))
    assert bounds(of_sums) == pytest.approx(bounds(mean_interval(values, groups)))
