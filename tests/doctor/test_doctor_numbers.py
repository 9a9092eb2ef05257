"""What the rules compute, beside slow versions and worked examples."""

from itertools import combinations, pairwise, permutations

import numpy as np
import pyarrow as pa
import pytest
from doctor_helpers import LENGTH, healthy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cavesson.doctor.groups import groups, within
from cavesson.doctor.mann_kendall import mann_kendall
from cavesson.doctor.rows import Rows
from cavesson.doctor.rules.returns import returns
from cavesson.doctor.rules.reward import _between
from cavesson.doctor.sample import by_tenth, chosen_steps
from cavesson.doctor.series import averaged, over_median, series, since, slope_by_step, smoothed, trend


def test_groups_beside_a_slow_version(tmp_path):
    rows = healthy().data(tmp_path / "run").rows
    reward = rows["reward"]
    found = groups(rows, reward)
    keys = sorted({(step, group) for step, group in zip(rows.step, rows["group"], strict=True)})
    slow = [reward[(rows.step == step) & (rows["group"] == group)] for step, group in keys]
    assert found.step.tolist() == [step for step, _ in keys]
    assert found.mean == pytest.approx([some.mean() for some in slow])
    assert found.sd == pytest.approx([some.std() for some in slow])
    assert np.bincount(rows.group, within(rows, reward)) == pytest.approx(np.zeros(len(keys)), abs=1e-9)


def trl_of(made):
    """The run as TRL's PPO leaves it: the score of a response that has ended is on the token behind, unrecorded."""
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    ended = (made.rows["finish_reason"] == "eos")[..., None]
    made.tokens["token_reward"] -= np.where(last & ended, made.rows["reward"][..., None], 0.0)
    made.info = {"trainer": "trl 1.10.0", "algorithm": "ppo", "config": {"kl_estimator": "k1", "whiten_rewards": False}}
    return made


def test_returns_have_the_score_that_trl_puts_behind_the_end(tmp_path):
    made = healthy(steps=3)
    expected = returns(*(lambda data: (data, data.sample))(made.data(tmp_path / "whole")))
    data = trl_of(made).data(tmp_path / "trl")
    assert returns(data, data.sample) == pytest.approx(expected, abs=2e-3)  # token rewards have eleven bits


def test_returns_are_not_known_where_the_missing_score_would_be_whitened(tmp_path):
    made = trl_of(healthy(steps=3))
    made.info["config"]["whiten_rewards"] = True
    data = made.data(tmp_path / "run")
    assert np.isnan(returns(data, data.sample)).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-3, 3)), min_size=12, max_size=30))
def test_the_share_between_prompts_beside_a_slow_jackknife(pairs):
    key, value = np.array([key for key, _ in pairs]), np.array([value for _, value in pairs])

    def slow(key, value):
        groups = [value[key == one] for one in np.unique(key) if np.sum(key == one) >= 2]
        everything = np.concatenate(groups)
        inside = sum(np.sum((one - one.mean()) ** 2) for one in groups) / sum(len(one) - 1 for one in groups)
        return max(0.0, 1 - inside / np.var(everything)) if np.var(everything) > 1e-3 else None

    several = [one for one in np.unique(key) if np.sum(key == one) >= 2]
    without = [slow(key[key != one], value[key != one]) for one in several] if len(several) > 2 else [None]
    if None in without or slow(key, value) is None:
        return
    share, error, _ = _between(key, value)
    assert share == pytest.approx(slow(key, value), abs=1e-6)
    count = len(several)
    assert error == pytest.approx(np.sqrt((count - 1) / count * np.sum((without - np.mean(without)) ** 2)), abs=1e-6)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_returns_beside_a_slow_version(gamma, tmp_path):
    made = healthy(steps=3)
    made.info["config"]["ppo"]["gamma"] = gamma
    data = made.data(tmp_path / "run")
    sample = data.sample
    found, rewards = returns(data, sample), sample["token_reward"]
    for line in np.unique(sample.line):
        mine = np.flatnonzero(sample.line == line)
        slow = [sum(gamma**k * rewards[u] for k, u in enumerate(mine[i:])) for i in range(len(mine))]
        assert found[mine] == pytest.approx(slow, abs=1e-5)


def test_the_worst_tokens_beside_a_slow_version(tmp_path):
    sample = healthy(steps=3).data(tmp_path / "run").sample
    values = np.random.default_rng(4).normal(0, 1, len(sample))
    values[::3] = np.nan
    ranked = sorted(np.flatnonzero(np.isfinite(values)), key=lambda i: -values[i])
    places = dict.fromkeys((int(sample.step[i]), int(sample.rows.sample[sample.line[i]])) for i in ranked)
    found = sample.worst(values)
    assert [(one.step, one.sample) for one in found] == list(places)[:3]
    assert found[0].start == sample.position[ranked[0]] and found[0].stop == found[0].start + 1
    assert sample.worst(np.full(len(sample), np.nan)) == ()


def test_series_by_worked_examples():
    points = series(np.arange(6), np.array([1.0, 1, 1, 1, 20, 1]))
    assert over_median(points)[3:].tolist() == [1, 20, 1]
    assert np.isnan(over_median(points)[:3]).all()
    bad = np.array([True, False, False, True, True, True])
    assert since(points, bad, least=3) == 3 and since(points, bad, least=4) is None
    rising = trend(series(np.arange(10), np.append(2.0 * np.arange(9), -100)))
    assert rising.change == pytest.approx(18)  # the slope is 2 over nine steps, whatever the last one says


NUMBERS = st.lists(st.integers(-50, 50), min_size=4, max_size=7, unique=True)


@settings(deadline=None)
@given(NUMBERS)
def test_trends_beside_a_slow_version(values):
    """Theil–Sen: the median of all slopes. Mann–Kendall: of all orders of the values, how many are as much in order."""

    def order(some):
        return sum(np.sign(b - a) for a, b in combinations(some, 2))

    step = np.cumsum(np.arange(1, len(values) + 1))
    found = trend(series(step, np.array(values, float)))
    slopes = [(values[j] - values[i]) / (step[j] - step[i]) for i, j in combinations(range(len(values)), 2)]
    assert found.change == pytest.approx(np.median(slopes) * (step[-1] - step[0]))
    orders = [abs(order(some)) for some in permutations(values)]
    assert found.p == pytest.approx(np.mean(np.array(orders) >= abs(order(values))))


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=20))
def test_the_test_of_a_trend_is_that_of_scipy_also_with_equal_values(values):
    expected = stats.kendalltau(range(len(values)), values).pvalue
    assert mann_kendall(np.array(values, float)) == pytest.approx(1.0 if np.isnan(expected) else expected)


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(1, 12))
def test_stretches_and_running_medians_beside_slow_versions(values, most):
    points = series(np.arange(len(values)), np.array(values))
    thin = averaged(points, most)
    assert len(thin) == min(most, len(values)) and thin.step[0] == 0
    parts = [values[a:b] for a, b in pairwise([*thin.step.tolist(), len(values)])]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert thin.value == pytest.approx([np.mean(part) for part in parts], rel=1e-9, abs=1e-6)
    medians = [np.median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
    assert smoothed(points).value.tolist() == pytest.approx(medians)


def slow_since(bad, least):
    """From each bad point on, as long as four in five are bad: the first stretch that has enough of them."""
    start = 0
    while start < len(bad):
        end, reached = start, False
        while end < len(bad) and sum(bad[start : end + 1]) >= 0.8 * (end + 1 - start):
            end += 1
            reached |= sum(bad[start:end]) >= least
        if reached:
            return start
        start = max(end, start) + 1
    return None


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_since_when_it_is_bad_beside_a_slow_version(bad, least):
    points = series(np.arange(len(bad)), np.zeros(len(bad)))
    assert since(points, np.array(bad, bool), least) == slow_since(bad, least)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.5, -2.0, 7.0, np.nan, np.inf])), max_size=30))
def test_numbers_by_step_beside_a_slow_version(values):
    values.sort(key=lambda pair: pair[0])
    table = {"step": [step for step, _ in values], "sample": list(range(len(values))), "kl_k1": [v for _, v in values]}
    rows = Rows(pa.table(table, pa.schema({"step": pa.int32(), "sample": pa.int32(), "kl_k1": pa.float64()})))
    known = {step: [v for s, v in values if s == step and np.isfinite(v)] for step in sorted({s for s, _ in values})}
    slow = {step: some for step, some in known.items() if some}
    for found, statistic in ((rows.mean("kl_k1"), np.mean), (rows.by_step(rows["kl_k1"], np.max), np.max)):
        assert found.step.tolist() == list(slow)
        assert found.value.tolist() == pytest.approx([statistic(some) for some in slow.values()])


@settings(deadline=None)
@given(st.integers(1, 400))
def test_the_steps_that_are_looked_at_lie_over_the_whole_run(count):
    steps = np.cumsum(np.arange(1, count + 1) % 3 + 1)
    chosen = chosen_steps(steps)
    assert len(chosen) == min(count, 96) and len(np.unique(chosen)) == len(chosen) and np.isin(chosen, steps).all()
    assert chosen[:4].tolist() == steps[:4].tolist() and chosen[-32:].tolist() == steps[-32:].tolist()
    places = np.searchsorted(steps, chosen)
    assert np.diff(places).max(initial=0) <= max(1, np.ceil(count / 59))


def test_of_a_large_step_whole_groups_are_looked_at_and_over_the_run_each_part_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("cavesson.doctor.sample.MAX_TOKENS", 24 * 8 * 6)
    made = healthy(batch=64, siblings=4)
    made.tokens["mask"] = np.arange(made.mask.shape[-1]) < 6 * np.ones((24, 64, 1))
    data = made.data(tmp_path / "run")
    rows = data.sample.rows
    samples = [rows.sample[rows.step == step] for step in rows.steps]
    assert all(len(some) == 8 and (some // 4 == np.repeat(np.unique(some // 4), 4)).all() for some in samples)
    seen = np.bincount(np.concatenate(samples) // 16, minlength=4)
    assert seen.min() > 0.5 * seen.mean()  # of four processes with 16 rollouts of each step
    assert data.sample.total(np.ones(len(data.sample))).tolist() == [6] * len(rows)
    everything = data.run.arrow("tokens")
    keys = zip(*(everything[name].to_pylist() for name in ("step", "sample")), strict=True)
    mine = set(zip(rows.step.tolist(), rows.sample.tolist(), strict=True))
    kept = np.array([key in mine for key in keys])
    assert data.sample["logprob"] == pytest.approx(everything["logprob"].to_numpy()[kept])


def test_tokens_of_two_precisions_are_one_sample(tmp_path):
    made = healthy(steps=3)
    made.tokens["value"] = made.tokens["value"].astype(np.float64)
    made.tokens["value"][1, 0, 0] = 1e300  # which float32 has not
    data = made.data(tmp_path / "run")
    assert data.sample["value"].max() > 9e299 and len(data.sample.rows.steps) == 3


def test_slopes_by_step_beside_numpy():
    chance = np.random.default_rng(0)
    step = chance.integers(0, 5, 200)
    x, y = chance.normal(size=(2, 200))
    x[step == 3] = 7.0  # on which nothing can lie
    found = slope_by_step(step, x, y)
    assert found.step.tolist() == [0, 1, 2, 4]
    assert found.value == pytest.approx([np.polyfit(x[step == one], y[step == one], 1)[0] for one in found.step])


def test_means_by_tenth_of_another_order():
    order = np.array([*range(20), np.nan, 30.0])[::-1]
    values = np.array([*range(20), 5.0, np.nan])[::-1] ** 2
    # What is not measured on both sides is left out: squares of 0 1, 2 3, …, 18 19.
    found = by_tenth(order, values)
    assert found.step.tolist() == list(range(1, 11))
    assert found.value.tolist() == [((2 * i) ** 2 + (2 * i + 1) ** 2) / 2 for i in range(10)]
