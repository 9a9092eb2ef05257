"""What sets a selection apart, against slow loops over the record; and searches in prompts, answers and reasons."""

import re
from math import sqrt
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from board_helpers import ask, board_of, client_of
from episode_helpers import record_episodes
from index_helpers import new_run, record
from scipy import stats

import cavesson
from cavesson.ops.intervals import difference_interval

STEPS, BATCH = 5, 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = new_run(tmp_path_factory.mktemp("statistics") / "run")
    reasons = [{"good": f"Because of {i}"} if i % 3 else None for i in range(BATCH)]
    record(
        folder,
        range(STEPS),
        batch=BATCH,
        ground_truth=[f"Answer {i // 2}" for i in range(BATCH)],
        reward_reasons=reasons,
    )
    return folder


@pytest.fixture(scope="module")
def rows(run) -> list[dict[str, Any]]:
    return cavesson.open(run).rows().to_pylist(maps_as_pydicts="strict")


@pytest.fixture(scope="module")
def client(run):
    board = board_of(run)
    yield client_of(board)
    board.scanner.stop()


def statistics(client, **parameters) -> dict[str, Any]:
    answer = client.get("/api/runs/run/statistics", params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def slow_difference(chosen: list[tuple[float, str]], rest: list[tuple[float, str]]) -> list[float]:
    """The difference of the means of values with their prompts, and its interval, one prompt after another."""
    means = [fmean(value for value, _ in side) for side in (chosen, rest)]
    prompts = {prompt for _, prompt in chosen + rest}
    total = 0.0
    for prompt in prompts:
        mine = sum(value - means[0] for value, own in chosen if own == prompt) / len(chosen)
        others = sum(value - means[1] for value, own in rest if own == prompt) / len(rest)
        total += (mine - others) ** 2
    free = min(len({prompt for _, prompt in side}) for side in (chosen, rest)) - 1
    half = stats.t.ppf(0.975, free) * sqrt(total * len(prompts) / (len(prompts) - 1))
    difference = means[0] - means[1]
    return [difference, difference - half, difference + half]


@pytest.mark.parametrize("column", ["reward", "length", "kl_k1"])
def test_means_differences_and_curves_are_those_of_slow_loops(client, rows, column):
    selection = {"filter": 'finish_reason == "eos" and reward > 1', "steps": "1-4"}
    got, details = statistics(client, **selection), statistics(client, **selection, details=True)
    within = [row for row in rows if 1 <= row["step"] <= 4]
    chosen = [row for row in within if row["finish_reason"] == "eos" and row["reward"] > 1]
    rest = [row for row in within if row not in chosen]
    assert (got["selected"], got["rest"]) == (len(chosen), len(rest)) and 5 < len(chosen) < 30
    assert got == {name: details[name] for name in got}
    line = got["columns"][column]
    for side, own in (("selected", chosen), ("rest", rest)):
        assert line[side] == pytest.approx(fmean(row[column] for row in own), rel=1e-5)
        by_step = [[row[column] for row in own if row["step"] == step] for step, _ in details["steps"]]
        assert details["curves"][column][side] == pytest.approx(
            [fmean(one) if one else None for one in by_step], rel=1e-5
        )
    pairs = [[(row[column], row["prompt"]) for row in side] for side in (chosen, rest)]
    assert line["difference"] == pytest.approx(slow_difference(*pairs), rel=1e-4, abs=1e-6)


def test_shares_of_finish_reasons_have_intervals(client, rows):
    got = statistics(client, filter="length > 5", details=True)
    chosen = [row for row in rows if row["length"] > 5]
    rest = [row for row in rows if row["length"] <= 5]
    assert [line["name"] for line in got["finish_reasons"]] in (["eos", "length"], ["length", "eos"])
    for line in got["finish_reasons"]:
        mine, others = (
            [(float(row["finish_reason"] == line["name"]), row["prompt"]) for row in side] for side in (chosen, rest)
        )
        wins = int(sum(value for value, _ in mine))
        exact = stats.binomtest(wins, len(mine)).proportion_ci(0.95, "exact")
        assert line["selected"] == pytest.approx(wins / len(mine))
        assert line["rest"] == pytest.approx(fmean(value for value, _ in others))
        assert line["interval"] == pytest.approx([exact.low, exact.high])
        assert line["difference"] == pytest.approx(slow_difference(mine, others))


def test_what_is_selected_whole_or_not_at_all_has_no_difference(client):
    everything, nothing = statistics(client), statistics(client, filter="reward > 1000", details=True)
    assert everything["rest"] == 0 and everything["columns"]["reward"]["difference"] is None
    assert nothing["selected"] == 0 and nothing["columns"]["reward"]["selected"] is None
    assert nothing["finish_reasons"][0]["interval"] is None and nothing["words"] == []


def test_responses_that_repeat_each_other_add_nothing_to_what_is_known():
    """Doubling every response doubles the values, but not what is known."""
    values, chosen = np.random.default_rng(0).normal(size=40), np.arange(40) % 2 == 0
    once = difference_interval(values, chosen, np.arange(40))
    twice = difference_interval(np.repeat(values, 2), np.repeat(chosen, 2), np.repeat(np.arange(40), 2))
    assert (twice.mean, twice.low, twice.high) == pytest.approx((once.mean, once.low, once.high))
    apart = difference_interval(np.repeat(values, 2), np.repeat(chosen, 2), np.arange(80))
    assert apart.high - apart.low < twice.high - twice.low


def test_tools_and_words_of_a_selection(tmp_path):
    run = record_episodes(tmp_path / "run", steps=3)
    client = client_of(board_of(run))
    got = statistics(client, filter="reward == 1", details=True)
    tools = {line["name"]: (line["selected"], line["rest"]) for line in got["tools"]}
    assert tools == {"multiply": (1.0, 0.25), "search": (0.0, 0.5)}
    responses = [(row["reward"], row["response"]) for row in cavesson.open(run).rows().to_pylist()]
    assert len(got["words"]) == 12
    for line in got["words"][:6]:
        of = [
            [line["name"] in text.lower() for reward, text in responses if (reward == 1) == side]
            for side in (True, False)
        ]
        assert [line["selected"], line["rest"]] == [fmean(of[0]), fmean(of[1])] == [1.0, 0.0], line


@pytest.mark.parametrize(
    ("within", "q", "regex"),
    [
        ("prompt", "PROMPT 3", False),
        ("prompt", "prompt [24]$", True),
        ("ground_truth", "answer 1", False),
        ("reasons", "because of 1", False),
        ("reasons", "of (4|11)$", True),
    ],
)
def test_a_search_covers_prompts_right_answers_and_reasons(client, rows, within, q, regex):
    def text(row: dict[str, Any]) -> str | None:
        return "\n".join((row["reward_reasons"] or {}).values()) if within == "reasons" else row[within]

    pattern = re.compile(q if regex else re.escape(q), 0 if regex else re.IGNORECASE)
    wanted = [(row["step"], row["sample"]) for row in rows if pattern.search(text(row) or "")]
    found = ask(client, q=q, within=within, **({"regex": 1} if regex else {}))
    assert [(row["step"], row["sample"]) for row in found["rows"]] == wanted and 0 < len(wanted) < len(rows)
    assert statistics(client, q=q, within=within, regex=regex)["selected"] == len(wanted)
    hits = client.get("/api/runs/run/hits", params={"q": q, "within": within, "regex": regex}).json()
    assert sum(hits["hits"]) == len(wanted)


def test_a_search_in_responses_is_not_one_in_prompts(client):
    assert ask(client, q="prompt 3")["total"] == 0
    assert client.get("/api/runs/run/rows", params={"q": "(", "within": "prompt", "regex": 1}).status_code == 400
