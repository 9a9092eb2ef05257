"""Rewards of turns stand before the last token, and are neither a misplaced score nor a wrong penalty."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules.token_rewards import penalty_wrong, reward_accounting, reward_position
from cavesson.record import Recorder, begin_attempt, write_run

RULES = [reward_position, penalty_wrong, reward_accounting]


def moved() -> tuple[Made, np.ndarray]:
    """A run whose whole reward is on each second token, where a first turn of two tokens ends; and which have one."""
    made = healthy()
    has_two = made.mask.sum(-1) > 3
    last = made.mask.sum(-1) - 1
    for step, row in zip(*np.nonzero(has_two), strict=True):
        reward = made.rows["reward"][step, row]
        made.tokens["token_reward"][step, row, 1] += reward
        made.tokens["token_reward"][step, row, last[step, row]] -= reward
    return made, has_two


def recorded(made: Made, has_two: np.ndarray, folder: Path, *, with_rewards: bool) -> RunData:
    write_run(folder, made.info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step, several in enumerate(has_two):
            rows = {name: column[step] for name, column in made.rows.items()} | {"sample": np.arange(len(several))}
            turns: dict[str, list] = {name: [] for name in ("sample", "role", "first_token", "tokens", "reward")}
            for row in np.flatnonzero(several):
                given = float(made.rows["reward"][step, row]) if with_rewards else None
                size = int(made.mask[step, row].sum())
                for first, count, reward in ((0, 2, given), (2, size - 2, None)):
                    for name, value in zip(turns, (int(row), "assistant", first, count, reward), strict=True):
                        turns[name].append(value)
            tokens = {name: column[step] for name, column in made.tokens.items()}
            recorder.rollouts(step, rows, tokens, turns)
    return RunData(cavesson.open(folder))


@pytest.mark.parametrize("with_rewards", [True, False])
def test_only_a_score_that_no_turn_explains_is_on_the_wrong_token(tmp_path: Path, with_rewards: bool) -> None:
    made, has_two = moved()
    assert has_two.mean() > 0.3
    found = diagnose(recorded(made, has_two, tmp_path / "run", with_rewards=with_rewards), RULES)
    assert ("reward-position" in [one.rule.name for one in found.findings]) == (not with_rewards)
    if with_rewards:
        assert found.findings == ()
        assert len(found.healthy) == 3
