"""What the API says of episodes: turns, tools, sources of tokens, filters over calls."""

import numpy as np
import pytest
from board_helpers import ORIGIN, ask, board_of, client_of
from episode_helpers import EPISODES, REWARDS, record_episodes

import cavesson

BASE = "/api/runs/run"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    board = board_of(record_episodes(tmp_path_factory.mktemp("episodes") / "run"))
    yield client_of(board)
    board.scanner.stop()


def samples(client, condition):
    return [row["sample"] for row in ask(client, filter=condition, steps="1")["rows"]]


def expected(holds):
    """The samples with a call for which a condition holds, found turn by turn."""
    return [
        sample
        for sample, turns in enumerate(EPISODES)
        if any(holds(turn["name"], turn.get("error") is not None, turn) for turn in turns if turn["role"] == "tool")
    ]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('tool == "search" and error', lambda tool, error, _: tool == "search" and error),
        ('tool == "search" and not error', lambda tool, error, _: tool == "search" and not error),
        ('tool == "multiply" and error', lambda tool, error, _: tool == "multiply" and error),
        ('tool == "multiply" and not error', lambda tool, error, _: tool == "multiply" and not error),
        ('tool != "search"', lambda tool, error, _: tool != "search"),
        ('"multiply" == tool', lambda tool, error, _: tool == "multiply"),
        ('tool in ["multiply", "absent"]', lambda tool, error, _: tool == "multiply"),
        ('tool not in ["multiply"]', lambda tool, error, _: tool != "multiply"),
        ("error", lambda tool, error, _: error),
        ("error is None", lambda tool, error, _: not error),
        ("tool is not None", lambda tool, error, _: True),
        ('(tool == "search" and error) and reward > 0.1', lambda tool, error, t: tool == "search" and error),
        ('error and reward < 0.1', lambda tool, error, turn: error and REWARDS[turn["sample"]] < 0.1),
        ('tool == "absent"', lambda tool, error, _: False),
    ],
)  # fmt: skip
def test_a_filter_over_calls_holds_if_it_holds_for_one_call(client, condition, holds):
    assert samples(client, condition) == expected(holds)


def test_turns_and_calls_are_columns(client):
    assert samples(client, "turns == 4") == [1] and samples(client, "calls == 2 and call_errors == 1") == [1, 2]
    assert samples(client, "turns is None") == [4], "turns that were not recorded are not zero"
    assert samples(client, "calls == 0") == [3]
    order = [row["sample"] for row in ask(client, sort="-turns", steps="0")["rows"]]
    assert order[:2] == [1, 2] and order[-1] == 4
    columns = client.get("/api/runs").json()[0]["columns"]
    assert {"turns", "calls", "call_errors"} <= set(columns["rows"]) and columns["tools"] == ["multiply", "search"]
    series = client.get(f"{BASE}/series", params={"names": "turns"}).json()
    assert series["rollups"]["turns"]["mean"] == [np.mean([2, 4, 3, 1])] * 2


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("tool > 2", "texts? can only|text"),
        ('error == "timed out"', "write error, or not error"),
        ("tool", "in quotes"),
    ],
)
def test_a_filter_over_calls_that_means_nothing_is_one_plain_line(client, condition, words):
    answer = client.get(f"{BASE}/rows", params={"filter": condition})
    assert answer.status_code == 400 and "\n" not in answer.json()["error"]
    assert any(word in answer.json()["error"] for word in words.split("|"))


@pytest.mark.parametrize("condition", ['tool == "search" and error', "error", "turns > 2", "call_errors > 0"])
def test_a_run_without_turns_says_so(folder, board, condition):
    answer = client_of(board).get(f"{BASE}/rows", params={"filter": condition})
    assert answer.status_code == 400
    assert "this run has no recorded" in answer.json()["error"]


def test_the_table_has_what_differs(client):
    rows = ask(client, steps="0", sort="step")["rows"]
    answers = [[turn["text"] for turn in turns if turn["role"] == "assistant"] for turns in EPISODES]
    assert [row["answer"] for row in rows] == [own[-1] if own else None for own in answers]
    assert [row["tools"] for row in rows] == [
        {"multiply": [1, 0]}, {"search": [2, 1]}, {"multiply": [1, 1], "search": [1, 0]}, {}, None,
    ]  # fmt: skip


def test_a_rollout_has_its_turns_and_its_tokens_have_their_sources(client):
    place = f"{BASE}/rollouts/1/1"
    rollout = client.get(place).json()
    assert [(turn["role"], turn["name"]) for turn in rollout["conversation"]] == [
        (turn["role"], turn.get("name")) for turn in EPISODES[1]
    ]
    failed = rollout["conversation"][1]
    assert (failed["error"], failed["seconds"]) == ("timed out after 2 seconds", 2.0)
    column = next(column for column in rollout["tokens"]["columns"] if column["name"] == "source")
    count = rollout["tokens"]["count"]
    codes = np.frombuffer(client.get(f"{place}/tokens").content, np.dtype(column["dtype"]), count, column["offset"])
    names = ("sampled", "template", "tool", "user")
    for turn in rollout["conversation"]:
        own = codes[turn["first_token"] : turn["first_token"] + turn["tokens"]]
        assert {names[code] for code in own} == {{"assistant": "sampled"}.get(turn["role"], turn["role"])}
    assert "template" in {names[code] for code in codes}
    assert client.get(f"{BASE}/rollouts/1/4").json()["conversation"] == []


def test_the_tools_of_a_step(client):
    found = client.get(f"{BASE}/tools", params={"step": 1}).json()
    assert (found["rollouts"], found["turns"]) == (4, np.mean([2, 4, 3, 1]))
    multiply, search = found["tools"]
    assert (search["calls"], search["errors"], search["rollouts"]) == (3, 1, 2)
    assert (search["seconds"], search["slowest"], search["usual_error"]) == (1.0, 2.0, "timed out after 2 seconds")
    assert (search["reward_with"], search["reward_without"]) == (np.mean(REWARDS[1:3]), np.mean([1.0, 0.75]))
    assert (multiply["calls"], multiply["errors"], multiply["seconds"]) == (2, 1, 0.25)
    assert client.get(f"{BASE}/tools", params={"step": 1, "split": "eval"}).json()["tools"] == []


def test_the_responses_to_a_prompt_side_by_side_are_the_answers(client):
    (group,) = client.get(f"{BASE}/groups", params={"step": 0}).json()["groups"]
    assert [row["response"] for row in group["rows"]][1:] == ["Yes.", "I cannot tell.", "42", "No turns here."]


def test_a_comparison_shows_the_answer_of_the_newest_response(client):
    answer = client.get("/api/compare", params={"runs": "run@0-0,run@1-1"}).json()
    (prompt,) = answer["prompts"]
    for side in prompt["runs"]:
        own = [turn["text"] for turn in EPISODES[side["sample"]] if turn["role"] == "assistant"]
        assert side["response"] == (own[-1] if own else "No turns here.")


def test_sql_and_exports_have_the_turns(client):
    query = "SELECT name, count(*) n, count(error) e FROM turns WHERE role = 'tool' GROUP BY ALL ORDER BY ALL"
    answer = client.post(f"{BASE}/sql", json={"query": query}, headers=ORIGIN)
    assert answer.status_code == 200, answer.text
    assert answer.json()["rows"] == [["multiply", 4, 2], ["search", 6, 2]]
    lines = client.get(f"{BASE}/export", params={"filter": 'tool == "search" and error', "format": "csv"}).text
    assert "call_errors" in lines.splitlines()[0] and "timed out" in lines


def test_the_writer_counts_the_turns(tmp_path):
    run = cavesson.open(record_episodes(tmp_path / "run", steps=1))
    counts = run.rows(["turns", "calls", "call_errors"]).to_pylist()
    for turns, found in zip(EPISODES, counts, strict=True):
        roles = [turn["role"] for turn in turns]
        failed = sum(turn.get("error") is not None for turn in turns)
        whole = {"turns": roles.count("assistant"), "calls": roles.count("tool"), "call_errors": failed}
        assert found == (whole if turns else dict.fromkeys(whole))
