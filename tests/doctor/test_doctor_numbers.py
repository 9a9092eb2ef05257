"""What the rules compute, beside slow versions and worked examples."""

import numpy as np
import pytest
from doctor_helpers import healthy

from dressage.doctor.groups import groups, within
from dressage.doctor.rules.value import returns
from dressage.doctor.series import over_median, series, since, trend


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


def test_series_by_worked_examples():
    points = series(np.arange(6), np.array([1.0, 1, 1, 1, 20, 1]))
    assert over_median(points)[3:].tolist() == [1, 20, 1]
    assert np.isnan(over_median(points)[:3]).all()
    bad = np.array([True, False, False, True, True, True])
    assert since(points, bad, least=3) == 3 and since(points, bad, least=4) is None
    rising = trend(series(np.arange(10), np.append(2.0 * np.arange(9), -100)))
    assert rising.change == pytest.approx(18)  # the slope is 2 over nine steps, whatever the last one says
