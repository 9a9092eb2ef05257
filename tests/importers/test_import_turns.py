"""Turns and sources of tokens, as far as each log knows them."""

import json
from pathlib import Path

import pytest

from cavesson.errors import UserError
from cavesson.importers import import_run
from cavesson.importers.turns import Span, sources_of, spans_of, turns_of
from cavesson.record import Run
from cavesson.record import open as open_run

CALL = {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}
ANSWERS = [
    {"role": "assistant", "content": "I compute.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
SAMPLED = [True, True, False, False, False, True]


def imported(tmp_path: Path, name: str, *records: dict) -> Run:
    source = tmp_path / "log" / name
    source.parent.mkdir(parents=True)
    source.write_text("".join(json.dumps(record) + "\n" for record in records))
    import_run(tmp_path / "log", tmp_path / "run")
    return open_run(tmp_path / "run")


def said(run: Run) -> list[tuple]:
    names = ["turn", "role", "name", "arguments", "text", "first_token", "tokens", "error"]
    return [tuple(line[name] for name in names) for line in run.arrow("turns").to_pylist()]


TURNS = [
    (0, "assistant", None, None, None, 0, 2, None),
    (1, "tool", "multiply", '{"a": 6, "b": 7}', "42", 2, 3, None),
    (2, "assistant", None, None, "It is 42.", 5, 1, None),
]


def check(run: Run, source: list) -> None:
    found = said(run)
    assert [line[:4] + line[5:] for line in found] == [line[:4] + line[5:] for line in TURNS]
    assert found[0][4].startswith("I compute.") and "multiply" in found[0][4]
    assert [line[4] for line in found[1:]] == ["42", "It is 42."]
    tokens = run.tokens(run.rows(["step"])["step"][0].as_py())
    assert tokens["source"].to_pylist() == source
    assert tokens["learned"].to_pylist() == SAMPLED


def test_the_nodes_of_prime_rl_say_what_the_template_wrote(tmp_path):
    messages = [{"role": "user", "content": "6*7?"}, *ANSWERS]
    # A node has its header too: 9 begins a message, and was not sampled.
    ids, masks = [[1, 2], [9, 5, 6], [7, 8], [9, 3]], [[0, 0], [0, 1, 1], [0, 0], [0, 1]]
    nodes = [
        {"message": message, "token_ids": own, "mask": list(map(bool, mask)), "sampled": any(mask),
         "parent": None if not place else place - 1}
        for place, (message, own, mask) in enumerate(zip(messages, ids, masks, strict=True))
    ]  # fmt: skip
    trace = {"nodes": nodes, "rewards": {"right": 1.0}, "task": {}}
    run = imported(tmp_path, "step_4/train/all/traces.jsonl", {"traces": [trace], "group": {"id": 1}})
    assert run.tokens(4)["source"].to_pylist() == ["sampled", "sampled", "tool", "tool", "template", "sampled"]
    # The header of the last message belongs to it.
    assert [line[5:7] for line in said(run)] == [(0, 2), (2, 2), (4, 2)]
    assert [line[1:4] for line in said(run)] == [line[1:4] for line in TURNS]


def test_the_rollouts_of_verifiers(tmp_path):
    def turn(before: list[int], ids: list[int]) -> dict:
        tokens = {"prompt_ids": before, "completion_ids": ids, "completion_mask": [1] * len(ids)}
        return {"tokens": tokens | {"completion_logprobs": [-1.0] * len(ids)}}

    record = {"example_id": 0, "prompt": [{"role": "user", "content": "6*7?"}], "completion": ANSWERS, "reward": 1.0}
    record |= {"step": 2, "trajectory": [turn([1], [5, 6]), turn([1, 5, 6, 9, 7, 9], [3])]}
    check(imported(tmp_path, "results.jsonl", record), ["sampled"] * 2 + ["tool"] * 3 + ["sampled"])


def test_messages_of_nemo_rl(tmp_path):
    content = [{"role": "user", "content": "6*7?"}, *ANSWERS]
    record = {"content": [content], "rewards": [1.0], "idx": [0], "token_ids": [[1, 5, 6, 9, 7, 9, 3, 0]]}
    record |= {"token_loss_mask": [[0, *map(int, SAMPLED), 0]], "input_lengths": [7]}
    check(
        imported(tmp_path, "train_data_step3.jsonl", record), ["sampled"] * 2 + ["tool"] * 3 + ["sampled"]
    )  # fmt: skip


def test_texts_of_nemo_rl_tell_only_what_was_sampled(tmp_path):
    record = {"content": [["6*7?", "call", "42", "It is 42."]], "rewards": [1.0], "idx": [0]}
    record |= {"token_ids": [[1, 5, 6, 9, 7, 9, 3]], "token_loss_mask": [[0, *map(int, SAMPLED)]], "input_lengths": [7]}
    run = imported(tmp_path, "train_data_step3.jsonl", record)
    assert run.tokens(3)["source"].to_pylist() == ["sampled"] * 2 + [None] * 3 + ["sampled"]
    assert not run.has_turns(), "nobody says who spoke"


def test_trl_logs_messages_without_tokens(tmp_path):
    record = {"step": 1, "prompt": [{"role": "user", "content": "6*7?"}], "completion": ANSWERS, "advantage": 0.5}
    run = imported(tmp_path, "completions.jsonl", {name: [value] for name, value in (record | {"right": 1.0}).items()})
    assert [line[1:4] for line in said(run)] == [line[1:4] for line in TURNS]
    assert [line[5:7] for line in said(run)] == [(None, None)] * 3


def test_calls_are_matched_by_identifier_then_by_name():
    calls = [
        {"id": "x", "function": {"name": "add", "arguments": {"a": 1}}},
        {"id": "y", "function": {"name": "add", "arguments": {"a": 2}}},
        {"function": {"name": "search", "arguments": {"q": "w"}}},
    ]
    answers = [
        {"role": "tool", "tool_call_id": "y", "content": "two"},
        {"role": "tool", "name": "search", "content": "{'error': 'no network'}"},
        {"role": "tool", "name": "add", "content": '{"error": "too large"}'},
        {"role": "tool", "name": "add", "content": '{"error": null, "value": 3}'},
    ]
    found = turns_of([{"role": "assistant", "content": "", "tool_calls": calls}, *answers])[1:]
    assert [(turn["name"], turn["arguments"], turn["error"]) for turn in found] == [
        ("add", '{"a": 2}', None),
        ("search", '{"q": "w"}', "no network"),
        ("add", '{"a": 1}', "too large"),
        ("add", None, None),
    ]


@pytest.mark.parametrize("messages", ["a text", None, [1, 2], {"role": "user"}])
def test_what_is_not_a_conversation_has_no_turns(messages):
    assert turns_of(messages) == []
    assert sources_of(messages, [True, False]) == ["sampled", None]


def test_places_are_known_only_where_runs_and_messages_match():
    roles = ["assistant", "tool", "tool", "assistant", "user"]
    messages = [{"role": role, "content": ""} for role in roles]
    sampled = [True] * 2 + [False] * 5 + [True] + [False] * 3
    # Two results share one run of tokens: where the second begins is unknown.
    assert spans_of(messages, sampled) == [Span(0, 2), None, None, Span(7, 1), Span(8, 3)]
    assert sources_of(messages, sampled) == ["sampled"] * 2 + ["tool"] * 5 + ["sampled"] + ["user"] * 3
    assert spans_of(messages, sampled[:8]) == [None] * 5
    assert sources_of(messages, sampled[:8]) == ["sampled"] * 2 + [None] * 5 + ["sampled"]


def test_a_table_may_have_sources_and_the_earlier_name_of_learned(tmp_path):
    record = {"step": 0, "prompt": "p", "response": "r", "reward": 1.0, "token_id": [1, 2, 3]}
    odd = record | {"source": ["a file", "another", "a third"], "learned": [True, False, True]}
    run = imported(
        tmp_path, "log.jsonl", record | {"source": ["sampled", None, "tool"], "mask": [True, False, True]}, odd
    )  # fmt: skip
    assert run.tokens(0, 0)["source"].to_pylist() == ["sampled", None, "tool"]
    assert run.tokens(0, 1)["source"].to_pylist() == [None] * 3
    assert json.loads(run.rollout(0, 1).row["extra"]) == {"source": odd["source"]}, "these are not sources of tokens"
    assert run.tokens(0)["learned"].to_pylist() == [True, False, True] * 2


def trace(*turns: tuple[list[int], list[int], list[int]], **more: object) -> dict:
    """A trace of OpenEnv whose turns have these ids before, ids, and a mask over the latter."""
    asked = [{"role": "user", "content": "6*7?"}]
    said, found = [ANSWERS[:2], ANSWERS[2:]], []
    for number, (before, ids, mask) in enumerate(turns):
        found.append(
            {
                "node_id": f"n{number}",
                "prompt_token_ids": before,
                "completion_token_ids": ids,
                "per_token_logps": [-0.5] * len(ids),
                "loss_mask": [0] * len(before) + mask,
                "request": {"messages": list(asked), "tools": ["multiply"]},
                "response": {"choices": [{"message": said[number][0], "finish_reason": "stop"}]},
                "metadata": {"turn": number},
            }
        )
        asked += said[number]
    return {"schema_version": 1, "turns": found, **more}


def test_a_trace_of_openenv_is_one_text_with_sources(tmp_path):
    record = trace(([1, 2], [5, 6], [1, 1]), ([1, 2, 5, 6, 7, 8, 9], [3], [1]), step=4, reward=1.0, task="sums")
    run = imported(tmp_path, "traces.jsonl", record)
    check(run, ["sampled"] * 2 + ["tool"] * 3 + ["sampled"])
    (row,) = run.rows().to_pylist()
    assert (row["step"], row["reward"], row["prompt_ids"]) == (4, 1.0, [1, 2])
    assert "6*7?" in row["prompt"] and "It is 42." in row["response"]
    tokens = run.tokens(4)
    assert tokens["token_id"].to_pylist() == [5, 6, 7, 8, 9, 3]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, -0.5, None, None, None, -0.5]
    rest = json.loads(row["extra"])
    assert rest["task"] == "sums"
    assert rest["turns"][1] == {
        "node_id": "n1", "request": {"tools": ["multiply"]}, "response": {"choices": [{"finish_reason": "stop"}]},
        "metadata": {"turn": 1},
    }  # fmt: skip
    assert row["finish_reason"] == "stop"


def test_an_answer_of_openenv_that_the_next_request_does_not_repeat_is_kept(tmp_path):
    record = trace(([1, 2], [5, 6], [1, 1]), ([1, 2, 5, 6, 7], [3], [1]))
    record["turns"][0]["response"]["choices"][0]["message"] = {"role": "assistant", "content": "as the engine wrote it"}
    (row,) = imported(tmp_path, "traces.jsonl", record).rows().to_pylist()
    assert "as the engine wrote it" not in row["response"] and "as the engine wrote it" in row["extra"]


def test_an_agent_that_rewrites_its_history_has_two_rollouts_of_openenv(tmp_path):
    run = imported(tmp_path, "traces.jsonl", trace(([1, 2], [5, 6], [1, 0]), ([1, 9], [3], [1]), reward=None))
    rows = run.rows().to_pylist()
    assert [row["prompt_ids"] for row in rows] == [[1, 2], [1, 9]]
    assert [row["reward"] for row in rows] == [None, None]
    assert run.tokens(0, 0)["learned"].to_pylist() == [True, False]  # sampled, and masked by the producer
    assert run.tokens(0, 0)["source"].to_pylist() == ["sampled", "sampled"]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ({"loss_mask": [0, 1]}, "different lengths"),
        ({"loss_mask": [0, 0, 2]}, "not an id, a log-probability, or 0 or 1"),
        ({"prompt_token_ids": None}, "expected the lists"),
    ],
)
def test_a_broken_trace_of_openenv_is_said(tmp_path, turn, said):
    record = trace(([1, 2], [5], [1]))
    record["turns"][0] |= turn
    with pytest.raises(UserError, match=said):
        imported(tmp_path, "traces.jsonl", record)
