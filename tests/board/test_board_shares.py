"""Shares that were not logged are counted from the rollouts, as a slow loop over them counts."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run

import cavesson
from cavesson.record import Recorder

STEPS = 5


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of one to four of few different rewards, some without a reward or an end, and held-out responses."""
    folder = new_run(tmp_path_factory.mktemp("shares") / "run")
    random = np.random.default_rng(3)
    with Recorder(folder) as recorder:
        for step in range(STEPS):
            size = 24
            rewards = random.choice([0.0, 1.0, np.nan], size, p=[0.45, 0.45, 0.1])
            ends = random.choice(["length", "eos", ""], size).tolist()
            rows = {
                "prompt": [f"prompt {group}" for group in random.integers(0, 9, size)],
                "response": ["r"] * size,
                "reward": [None if np.isnan(reward) else reward for reward in rewards],
                "finish_reason": [end or None for end in ends],
                "split": random.choice(["train", "train", "eval"], size).tolist(),
            }
            recorder.rollouts(step, rows | ({"group": random.integers(0, 9, size).tolist()} if step % 2 else {}))
            recorder.metrics(step, {"loss": 1.0})
    return folder


def counted(run: Path) -> dict[str, list[float]]:
    cut, equal = [], []
    for step in range(STEPS):
        rows = [row for row in cavesson.open(run).rows(steps=[step]).to_pylist() if row["split"] == "train"]
        ends = [row["finish_reason"] for row in rows if row["finish_reason"] is not None]
        cut.append(sum(end == "length" for end in ends) / len(ends))
        groups = defaultdict[Any, list[float]](list)
        for row in rows:
            if row["reward"] is not None:
                groups[row["prompt"] if row["group"] is None else row["group"]].append(row["reward"])
        several = [rewards for rewards in groups.values() if len(rewards) > 1]
        equal.append(sum(len(one) for one in several if len(set(one)) == 1) / sum(map(len, several)))
    return {"rows/truncated": cut, "rows/zero_variance": equal}


def test_shares_are_those_of_a_loop_over_the_rollouts(run: Path) -> None:
    client = client_of(board_of(run))
    expected = counted(run)
    assert all(len(set(values)) > 2 for values in expected.values())
    got = client.get("/api/runs/run/series", params={"names": "rows/*"}).json()
    assert got["names"]["shares"] == [*expected] and got["step"] == [*range(STEPS)] and got["rollups"] == {}
    assert got["metrics"] == {name: pytest.approx(values) for name, values in expected.items()}
    some = client.get("/api/runs/run/series", params={"names": "rows/truncated", "steps": "1-3"}).json()
    assert some["step"] == [1, 2, 3] and [*some["metrics"]] == ["rows/truncated"]
    assert some["metrics"]["rows/truncated"] == pytest.approx(expected["rows/truncated"][1:4])


def test_what_was_logged_is_not_counted(tmp_path: Path) -> None:
    with Recorder(new_run(tmp_path / "run")) as recorder:
        recorder.rollouts(0, {"prompt": ["a"], "response": ["b"], "reward": [1.0], "finish_reason": ["length"]})
        recorder.metrics(0, {"finish/length": 0.25, "frac_reward_zero_std": 0.5})
    got = client_of(board_of(tmp_path / "run")).get("/api/runs/run/series").json()
    assert got["names"]["shares"] == [] and "rows/truncated" not in got["metrics"]
    assert got["metrics"]["finish/length"] == [0.25] and got["metrics"]["group/zero_std"] == [0.5]


def test_groups_of_one_have_no_variance_to_speak_of(tmp_path: Path) -> None:
    with Recorder(new_run(tmp_path / "run")) as recorder:
        recorder.rollouts(0, {"prompt": ["a", "b"], "response": ["r"] * 2, "reward": [1.0, 1.0]})
        recorder.metrics(0, {"loss": 1.0})
    got = client_of(board_of(tmp_path / "run")).get("/api/runs/run/series").json()
    assert got["names"]["shares"] == ["rows/zero_variance"] and got["metrics"]["rows/zero_variance"] == [None]
