"""Recorded rewards beside rescored ones on the board: against slow loops over the record, and against the command."""

from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from board_helpers import board_of, client_of
from browser_helpers import record_run
from index_helpers import add_rewards, indexed
from scipy import stats
from starlette.testclient import TestClient

import cavesson
from cavesson.board.runs import Board
from cavesson.index.prompt_ids import id_of
from cavesson.ops.intervals import share_interval
from cavesson.tools.rescored_report import report

STEPS = 6
Lines = list[dict[str, Any]]


def tone(rows: pa.Table) -> list[float | None]:
    """Rewards that agree with the recorded ones only in part, with ties, and that judge not every response."""
    generator = np.random.default_rng(5)
    noise = generator.normal(0, 0.8, len(rows))
    found = [round(reward + more, 1) for reward, more in zip(rows["reward"].to_pylist(), noise, strict=True)]
    return [None if place % 11 == 3 else value for place, value in enumerate(found)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = record_run(tmp_path_factory.mktemp("rescored") / "run", steps=STEPS)
    add_rewards(folder, "tone", range(STEPS), tone)
    return folder


@pytest.fixture(scope="module")
def lines(run: Path) -> Lines:
    opened = cavesson.open(run)
    again = {(one["step"], one["sample"]): one["reward"] for one in opened.rescored().to_pylist()}
    rows = opened.rows(["step", "sample", "split", "prompt", "response", "reward"]).to_pylist()
    return [row | {"again": again[row["step"], row["sample"]]} for row in rows]


@pytest.fixture(scope="module")
def client(run: Path) -> TestClient:
    return client_of(board_of(run))


def get(client: TestClient, **parameters: Any) -> Any:
    answer = client.get("/api/runs/run/rescored", params={"name": "tone", **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def slow_mean(values: list[tuple[float, str]]) -> list[float]:
    """The mean of values with their prompts, and Student's interval of the means of the prompts."""
    prompts = {prompt for _, prompt in values}
    means = [fmean(value for value, own in values if own == prompt) for prompt in prompts]
    half = stats.t.ppf(0.975, len(means) - 1) * stdev(means) / sqrt(len(means))
    mean = fmean(value for value, _ in values)
    return [mean, mean - half, mean + half]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_means_and_their_difference_are_those_of_slow_loops(client, lines, split):
    own = [line for line in lines if line["split"] == split]
    both = [line for line in own if line["again"] is not None]
    got = get(client, split=split)
    assert (got["rollouts"], got["both"]) == (len(own), len(both)) and len(both) < len(own)
    assert got["recorded"] == pytest.approx(slow_mean([(line["reward"], line["prompt"]) for line in own]))
    assert got["again"] == pytest.approx(slow_mean([(line["again"], line["prompt"]) for line in both]))
    more = [(line["again"] - line["reward"], line["prompt"]) for line in both]
    assert got["difference"] == pytest.approx(slow_mean(more))
    wanted = stats.spearmanr([line["reward"] for line in both], [line["again"] for line in both]).statistic
    assert got["correlation"] == pytest.approx(wanted)
    for step, recorded, again in zip(range(STEPS), got["curves"]["recorded"], got["curves"]["again"], strict=True):
        mine = [line for line in own if line["step"] == step]
        assert recorded == pytest.approx(fmean(line["reward"] for line in mine))
        assert again == pytest.approx(fmean(line["again"] for line in mine if line["again"] is not None))
    assert got["steps"] == [[step, step] for step in range(STEPS)]


def pairs_of(lines: Lines) -> list[tuple[dict[str, Any], dict[str, Any], float]]:
    """All pairs of responses to a prompt in a step that both judge, and the product of their two differences."""
    judged = [line for line in lines if line["again"] is not None]
    same = [
        (one, other)
        for one, other in combinations(judged, 2)
        if one["step"] == other["step"] and one["prompt"] == other["prompt"]
    ]
    return [(one, other, (one["reward"] - other["reward"]) * (one["again"] - other["again"])) for one, other in same]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_pairs_that_change_their_order_are_those_of_a_loop_over_all(client, lines, split):
    pairs = pairs_of([line for line in lines if line["split"] == split])
    ordered = [pair for pair in pairs if pair[2] != 0]
    flipped = [pair for pair in ordered if pair[2] < 0]
    got = get(client, split=split, limit=100)
    assert [got[name] for name in ("pairs", "ordered", "flipped")] == [len(pairs), len(ordered), len(flipped)]
    assert 0 < len(flipped) < len(ordered) and (split == "eval" or len(ordered) < len(pairs))
    names = [one["prompt"] for one, _, _ in ordered]
    share = share_interval(
        [float(product < 0) for _, _, product in ordered], [sorted(set(names)).index(n) for n in names]
    )
    assert got["share"] == pytest.approx([share.mean, share.low, share.high])
    for step in range(STEPS):
        mine = [product < 0 for one, _, product in ordered if one["step"] == step]
        assert got["curves"]["flipped"][step] == (pytest.approx(fmean(mine)) if mine else None)
    text_of = {id_of(line["prompt"]): line["prompt"] for line in lines}
    worst: dict[tuple[int, str], float] = {}
    for one, _, product in flipped:
        key = one["step"], one["prompt"]
        worst[key] = min(product, worst.get(key, 0.0))
    assert got["flipped_groups"] == len(worst) == len(got["groups"])
    told = [(group["step"], text_of[group["prompt_id"]]) for group in got["groups"]]
    assert [worst[key] for key in told] == pytest.approx(sorted(worst.values()))
    by_key = {(line["step"], line["sample"]): line for line in lines}
    for group in got["groups"]:
        first, second = group["responses"]
        assert first["recorded"] > second["recorded"] and first["again"] < second["again"]
        for one in (first, second):
            line = by_key[group["step"], one["sample"]]
            wanted = [line["reward"], line["again"], line["response"]]
            assert [one["recorded"], one["again"], one["response"]] == wanted


def test_the_command_and_the_board_give_one_answer(tmp_path):
    """The command counts the pairs of both splits together."""
    folder = record_run(tmp_path / "run", steps=3)
    add_rewards(folder, "tone", range(3), tone)
    found = report(cavesson.record.open(folder), "tone", 5)
    client = client_of(board_of(folder))
    both = [get(client, split=split) for split in ("train", "eval")]
    assert sum(one["flipped"] for one in both) == found.order.flipped > 0
    assert sum(one["ordered"] for one in both) == found.order.ordered
    assert sum(one["pairs"] for one in both) == found.order.pairs
    assert sum(one["flipped_groups"] for one in both) == found.order.flipped_groups
    means = {one.name: one for one in found.means}
    assert both[0]["recorded"][0] == pytest.approx(means["all steps"].recorded)
    assert both[0]["again"][0] == pytest.approx(means["all steps"].again)
    assert both[1]["again"][0] == pytest.approx(means["held out"].again)
    first, second = found.worst[0]
    told = [group for one in both for group in one["groups"]]
    assert [first.sample, second.sample] in [[one["sample"] for one in group["responses"]] for group in told]


def test_rewards_that_are_added_later_count_at_once(tmp_path):
    folder = record_run(tmp_path / "run", steps=2)
    add_rewards(folder, "tone", [0], tone)
    board = Board([cavesson.record.open(folder)])
    indexed(folder)
    client = client_of(board)
    assert get(client)["both"] < get(client)["rollouts"] / 2 + 1
    add_rewards(folder, "tone", [1], tone)
    indexed(folder)
    assert get(client)["both"] > get(client)["rollouts"] * 0.8


def test_a_name_that_there_is_not_is_one_line(client):
    answer = client.get("/api/runs/run/rescored", params={"name": "other"})
    assert answer.status_code == 404
    assert answer.json()["error"] == "run has no rewards 'other' that were computed again; there are: tone"


def test_a_group_has_the_rewards_of_every_response(client, lines):
    got = client.get("/api/runs/run/groups/2/1").json()["responses"]
    again = {line["sample"]: line["again"] for line in lines if line["step"] == 2}
    assert len(got) == 4
    for one in got:
        wanted = again[one["sample"]]
        assert one["rescored"] == {"tone": wanted if wanted is None else pytest.approx(wanted, rel=1e-6)}
