"""Rewards that were computed again as columns of the index."""

import numpy as np
from index_helpers import add_rewards, indexed, new_run, record

from cavesson.index.filters import matches
from cavesson.index.orders import order


def add(folder, name, steps, scale):
    add_rewards(folder, name, steps, lambda rows: scale * rows["sample"].to_numpy().astype(float))


def test_a_filter_and_an_order_know_the_rewards(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(4))
    add(folder, "tone", [0, 1], 2.0)
    shot = indexed(folder)
    step, sample = shot.raw("step"), shot.raw("sample")
    assert matches('rescore["tone"] >= 6', shot).tolist() == ((step < 2) & (sample >= 3)).tolist()
    assert matches('rescore["tone"] is None', shot).tolist() == (step >= 2).tolist()
    values = shot.column("rescore/tone")[order(shot, "rescore/tone")]
    assert values[:12].tolist() == sorted(2.0 * sample[step < 2])


def test_later_rewards_appear_and_removed_ones_go(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(2))
    add(folder, "tone", [0], 1.0)
    assert matches('rescore["tone"] is None', indexed(folder)).sum() == 6
    add(folder, "tone", [1], 1.0)
    add(folder, "other", [0], -1.0)
    shot = indexed(folder)
    assert not matches('rescore["tone"] is None', shot).any()
    assert matches('rescore["other"] == 0 - rescore["tone"]', shot).sum() == 6
    for path in (folder / "rescored" / "tone").iterdir():
        path.unlink()
    assert "rescore/tone" not in indexed(folder).names


def test_rewards_of_rollouts_that_are_indexed_later_are_found(tmp_path):
    folder = new_run(tmp_path / "run")
    record(folder, range(2))
    indexed(folder)
    record(folder, range(2, 3))
    add(folder, "tone", [0, 1, 2], 1.0)
    shot = indexed(folder)
    assert np.array_equal(shot.column("rescore/tone"), shot.raw("sample").astype("f4"))
    record(folder, range(1, 5))  # supersedes the steps 1 and 2
    shot = indexed(folder)
    found = matches('rescore["tone"] is not None', shot) & shot.alive
    assert set(shot.raw("step")[found].tolist()) == {0}
