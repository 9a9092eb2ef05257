"""Runs with `ppo.bootstrap_truncated`: their record adds up, the doctor agrees, and resuming changes nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train_helpers import SIGNAL, build, farthest, finish, quiet, timeless, weights

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.rules.returns import returns
from cavesson.errors import UserCodeError

CHANGES: dict[str, Any] = {
    "steps": 4, "batch_size": 8, "kl__coef": 0.1, "ppo__bootstrap_truncated": True, "ppo__lam": 1.0,
    "ppo__gamma": 0.9, "optimizer__learning_rate": 1e-2, "optimizer__eps": 1e-3,
    "sampling__random_length": None, "sampling__max_new_tokens": 5, "sampling__stop": ("e", "a", "t", " "),
}  # fmt: skip


def test_returns_of_cut_responses_contain_the_value_after_them(tmp_path: Path) -> None:
    finish(tmp_path / "run", **CHANGES)
    run, seen = cavesson.open(tmp_path / "run"), set()
    for step in range(4):
        tokens = run.tokens(step)
        for row in run.rows(steps=[step]).to_pylist():
            is_cut = row["finish_reason"] == "length"
            assert (row["next_value"] is not None) == is_cut
            assert row["shaped_reward"] == (0.0 if is_cut else row["reward"])
            seen.add((is_cut, bool(row["next_value"])))
            mine = tokens.filter(tokens["sample"].to_numpy() == row["sample"])
            following, size = row["next_value"] or 0.0, abs(row["next_value"] or 0.0)
            for token in reversed(mine.select(["token_reward", "return"]).to_pylist()):
                following = token["token_reward"] + 0.9 * following
                size = abs(token["token_reward"]) + 0.9 * size
                assert token["return"] == pytest.approx(following, abs=2 * SIGNAL * size + 1e-5)
    assert {(True, True), (False, False)} <= seen  # the critic predicts 0 at the first step


def test_the_doctor_adds_up_the_same_returns(tmp_path: Path) -> None:
    finish(tmp_path / "run", **CHANGES)
    data = RunData(cavesson.open(tmp_path / "run"))
    sample = data.sample
    goal = returns(data, sample)
    off = 2 * SIGNAL * (np.abs(sample["return"]) + np.abs(sample["token_reward"]) + 1)
    assert (np.abs(goal - sample["return"]) <= off)[sample.trained].all()


def test_without_the_setting_there_is_no_such_column(tmp_path: Path) -> None:
    finish(tmp_path / "run", **{**CHANGES, "ppo__bootstrap_truncated": False, "steps": 1})
    assert set(cavesson.open(tmp_path / "run").rows()["next_value"].to_pylist()) == {None}


@pytest.mark.parametrize("changes", [{"update__micro_batch_size": 1}, {"update__micro_batch_tokens": 30}])
def test_the_size_of_micro_batches_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    whole, split = finish(tmp_path / "whole", **CHANGES), finish(tmp_path / "split", **CHANGES, **changes)
    assert farthest(weights(whole.policy), weights(split.policy)) < 1e-5
    assert timeless(split.metrics[-1]) == pytest.approx(timeless(whole.metrics[-1]), rel=1e-4, abs=2e-5)


def test_a_resumed_run_is_the_same(tmp_path: Path) -> None:
    whole = finish(tmp_path / "whole", **CHANGES)
    first = build(tmp_path / "run", **CHANGES, checkpoint__every=1)

    def stop(step: int, metrics: dict[str, float]) -> None:
        if step == 1:
            raise RuntimeError("stopped here")

    with pytest.raises(UserCodeError, match="stopped here"):
        first.run(stop)
    again = build(tmp_path / "run", {"resume": True}, **CHANGES, checkpoint__every=1).run(quiet)
    assert farthest(weights(whole.policy), weights(again.policy)) == 0
