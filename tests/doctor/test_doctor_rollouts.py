"""Rollouts as arrays, and the effects of patterns in them."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cavesson.doctor.effects import Effects, Rewards
from cavesson.doctor.rows import Rows


def made(group: list[int | None], **columns: Any) -> Rows:
    """Rollouts of one step, if no others are given."""
    count = len(group)
    given = {
        "step": [0] * count,
        "sample": list(range(count)),
        "reward": [0.0] * count,
        "shaped_reward": [None] * count,
    }
    return Rows(pa.table({**given, "group": pa.array(group, pa.int64()), **columns}))


def test_a_rollout_whose_prompt_is_not_known_is_alone() -> None:
    rows = made([None, None, None, None, 3, 3, 4, 4], step=[0, 0, 0, 0, 1, 1, 1, 1], sample=[0, 1, 2, 3] * 2)
    assert rows.group.tolist() == [0, 1, 2, 3, 4, 4, 5, 5]
    assert len(set(rows.prompt.tolist())) == 6
    assert made([None, None]).group.tolist() == [0, 1]


def test_draws_of_a_prompt_are_told_apart_beside_rollouts_without_a_prompt() -> None:
    rows = made([*[None] * 9, 3, 3, 3, 3, 4, 4])
    _, sizes = np.unique(rows.group, return_counts=True)
    assert sorted(sizes.tolist()) == [1] * 9 + [2, 2, 2]


def test_the_highest_values_leave_out_what_is_not_known() -> None:
    rows = made([0] * 5)
    shown = rows.highest(np.array([-3.0, np.nan, -1.0, -np.inf, -2.0]))
    assert [one.sample for one in shown] == [2, 4, 0]
    assert rows.highest(np.full(5, -np.inf)) == ()


@pytest.mark.parametrize("effect", [0.5, -0.5])
def test_a_pattern_in_responses_to_one_of_several_prompts_explains_nothing(effect: float) -> None:
    random, prompt = np.random.default_rng(0), np.arange(800) % 2
    has = (random.random(800) < 0.4) & (prompt == 0)
    step = np.repeat(np.arange(20), 40)
    reward = effect * has + random.normal(0, 0.5, 800)
    rows = made(prompt.tolist(), step=step, sample=np.tile(np.arange(40), 20), reward=reward)
    assert Effects(Rewards(rows), np.full(800, 10), step >= 16).explained(has, 3.0) == 0


@pytest.mark.parametrize(("effect", "prompts"), [(0.5, 1), (-0.5, 1), (0.5, 40), (-0.5, 40)])
def test_only_a_pattern_with_a_higher_reward_explains_it(effect: float, prompts: int) -> None:
    random, count = np.random.default_rng(0), 800
    has = random.random(count) < 0.4
    reward = effect * has + random.normal(0, 0.5, count)
    step = np.repeat(np.arange(20), count // 20)
    columns = {"step": step, "sample": np.tile(np.arange(40), 20), "reward": reward}
    rows = made((np.arange(count) % prompts).tolist(), **columns)
    explained = Effects(Rewards(rows), np.full(count, 10), step >= 16).explained(has, 3.0)
    assert explained == 0 if effect < 0 else 0.1 < explained < 0.4
