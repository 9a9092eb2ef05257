"""Responses without a reward on the board: they count in no statistic, are told apart from 0, and are counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from board_helpers import board_of, client_of
from index_helpers import new_run, record
from starlette.testclient import TestClient

from cavesson.record import begin_attempt

NONE = [None] * 6


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    """Three steps of three groups of two: all rewards, some, and none; parts are null apart from the sum."""
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    record(folder, [0], attempt=attempt, reward=[1.0, 1.0, 2.0, 4.0, 0.0, 0.0])
    parts: list[Any] = [{"a": 1.0}, None, {"a": -3.0, "b": 2.0}, {"b": 5.0}, {}, None]
    record(folder, [1], attempt=attempt, reward=[1.0, None, -1.0, 5.0, None, None], reward_parts=parts)
    record(folder, [2], attempt=attempt, reward=NONE)
    return client_of(board_of(folder))


def get(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(f"/api/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text, parse_constant=pytest.fail)


def test_the_statistics_of_a_group_are_those_of_its_rewards(client: TestClient) -> None:
    names = ("n", "unscored", "mean", "sd", "min", "max", "zero_variance")
    expected = {
        0: [(2, 0, 1, 0, 1, 1, True), (2, 0, 3, 1, 2, 4, False), (2, 0, 0, 0, 0, 0, True)],
        1: [(2, 1, 1, 0, 1, 1, False), (2, 0, 2, 3, -1, 5, False), (2, 2, None, None, None, None, False)],
        2: [(2, 2, None, None, None, None, False)] * 3,
    }
    for step, groups in expected.items():
        found = get(client, "runs/run/groups", step=step, sort="group")["groups"]
        assert [tuple(one[name] for name in names) for one in found] == groups
    for sort, order in (("mean", [0, 1, 2]), ("-mean", [1, 0, 2]), ("-sd", [1, 0, 2]), ("sd", [0, 1, 2])):
        assert [one["group"] for one in get(client, "runs/run/groups", step=1, sort=sort)["groups"]] == order


def test_curves_histograms_and_tables_have_none_of_them(client: TestClient) -> None:
    series = get(client, "runs/run/series", names="reward,part/*")["rollups"]
    assert series["reward"]["count"] == [6, 3, 0] and series["reward"]["mean"] == [8 / 6, 5 / 3, None]
    assert series["part/a"]["mean"] == [None, -1, None] and series["part/b"]["min"] == [None, 2, None]
    for step, missing in ((0, 0), (1, 3), (2, 6)):
        histogram = get(client, "runs/run/histogram", column="reward", steps=f"{step}-{step}")
        assert (sum(histogram["counts"]), histogram["missing"]) == (6 - missing, missing)
    for sort, first in (("reward", -1.0), ("-reward", 5.0)):
        rewards = [one["reward"] for one in get(client, "runs/run/rows", sort=sort, limit=18)["rows"]]
        assert rewards[0] == first and rewards[9:] == [None] * 9 and None not in rewards[:9]
    assert get(client, "runs/run/rows", filter="reward is None")["total"] == 9
    assert get(client, "runs/run/rows", filter="reward == 0")["total"] == 2


def test_the_newest_step_may_have_no_reward(client: TestClient) -> None:
    (run,) = get(client, "runs")
    assert run["newest"] == 2


def test_runs_are_compared_by_their_rewards_alone(tmp_path: Path, client: TestClient) -> None:
    sides = [new_run(tmp_path / name) for name in ("some", "all", "none")]
    for folder, rewards in zip(sides, ([1.0, None, None, 7.0, None, None], [3.0] * 6, NONE), strict=True):
        record(folder, [0], reward=rewards)
    client = client_of(board_of(*sides))
    found = get(client, "compare", runs="some,all")
    assert [[one["mean"] for one in prompt["runs"]] for prompt in found["prompts"]] == [[7, 3], [1, 3]]
    assert found["sides"] == [{"n": 2, "unscored": 4, "mean": 4}, {"n": 6, "unscored": 0, "mean": 3}]
    found = get(client, "compare", runs="all,none")
    assert found["total"] == 0 and found["sides"][1] == {"n": 0, "unscored": 6, "mean": None}


def test_patterns_are_shares_of_all_responses_and_effects_of_those_with_a_reward(tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run")
    attempt = begin_attempt(folder, 0)
    texts = ["lake road", "lake bird", "tree road", "tree bird", "lake road", "lake bird"]
    record(folder, [0], attempt=attempt, response=texts, reward=[3.0, 1.0, 1.0, -1.0, None, None])
    record(folder, [1], attempt=attempt, response=texts, reward=NONE)
    found = get(client_of(board_of(folder)), "runs/run/patterns", kind="word", buckets=2)
    words = {line["text"]: line for line in found["patterns"]}
    assert found["steps"] == [[0, 0], [1, 1]]
    assert words["lake"]["share"] == [4 / 6, 4 / 6] and words["tree"]["share"] == [2 / 6, 2 / 6]
    assert words["lake"]["rows"] == 8 and words["road"]["rows"] == 6
    # Of the four with a reward: 2 and 0, 2 and 0.
    assert words["lake"]["reward_effect"] == pytest.approx(2) and words["bird"]["reward_effect"] == pytest.approx(-2)
    # What is left varies by 1 around the mean of its kind; the weight is 2 · 2 / 4.
    half = 1.959964
    assert words["lake"]["reward_effect_interval"] == pytest.approx([2 - half, 2 + half], rel=1e-4)


def test_patterns_of_a_run_without_rewards_have_no_effect(tmp_path: Path) -> None:
    folder = new_run(tmp_path / "run")
    record(folder, [0], response=["lake road"] * 3 + ["tree road"] * 3, reward=NONE)
    found = get(client_of(board_of(folder)), "runs/run/patterns", kind="word")
    assert {line["text"]: (line["share"], line["reward_effect"]) for line in found["patterns"]} == {
        "lake": ([0.5], None), "tree": ([0.5], None), "road": ([1], None),
    }  # fmt: skip
