"""What is exported as traces of OpenEnv keeps its rules, and is imported again with the same values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.exporters.openenv import export
from cavesson.importers import import_run
from cavesson.record import Recorder, begin_attempt, write_run

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
TURNS = {
    "sample": [0, 0, 0],
    "role": ["assistant", "tool", "assistant"],
    "text": [CALL, "42", "It is 42."],
    "name": [None, "multiply", None],
    "arguments": [None, '{"a": 6, "b": 7}', None],
}
ROWS = {
    "prompt": ["<|im_start|>user\nWhat is 6 * 7?<|im_end|>\n<|im_start|>assistant\n", "1+1?"],
    "response": [f"{CALL}…It is 42.", "2"],
    "prompt_ids": [[1, 2, 3], [4]],
    "reward": [1.5, -1.0],
    "reward_parts": [{"right": 1.0, "short": 0.5}, {"right": -1.0}],
    "ground_truth": ["42", "2"],
    "finish_reason": ["eos", "length"],
    "group": [7, 8],
}
TOKENS = {
    "token_id": [[5, 6, 7, 8, 9], [2]],
    "source": [["sampled", "sampled", "tool", "tool", "sampled"], ["sampled"]],
    "learned": [[True, True, False, False, True], [True]],
    "sampler_logprob": [[-0.5, -0.25, None, None, 0.0], [-1.0]],
}
SAME = ("step", "sample", "split", "prompt", "response", "prompt_ids", "reward", "reward_parts", "ground_truth")
OF_TOKENS = ("sample", "position", "token_id", "source", "learned", "sampler_logprob")


def record(folder: Path, rows: dict[str, Any], tokens: dict[str, Any], turns: dict[str, Any] | None = None) -> Path:
    write_run(folder, {"algorithm": "grpo"})
    with Recorder(folder, attempt=begin_attempt(folder, start_step=3)) as recorder:
        recorder.rollouts(3, {"split": ["train"] * len(rows["prompt"])} | rows, tokens, turns)
    return folder


def check(trace: dict[str, Any]) -> None:
    """The rules of OpenEnv 0.10 for a trace of version 1."""
    assert trace.keys() == {"schema_version", "turns"} and trace["schema_version"] == 1
    assert len({turn["node_id"] for turn in trace["turns"]}) == len(trace["turns"]) > 0
    for turn in trace["turns"]:
        assert turn.keys() == {
            "node_id", "prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask", "request",
            "response", "metadata",
        }  # fmt: skip
        before, own, mask = (turn[name] for name in ("prompt_token_ids", "completion_token_ids", "loss_mask"))
        assert before and all(type(one) is int and one >= 0 for one in before + own)
        assert len(turn["per_token_logps"]) == len(own) and len(mask) == len(before) + len(own)
        assert all(type(one) is float and math.isfinite(one) and one <= 0 for one in turn["per_token_logps"])
        assert not any(mask[: len(before)]) and all(type(one) is int and one in (0, 1) for one in mask)


def of_tokens(run: Path) -> list[tuple]:
    table = cavesson.open(run).arrow("tokens").sort_by([("sample", "ascending"), ("position", "ascending")])
    return [tuple(line[name] for name in OF_TOKENS) for line in table.to_pylist()]


def test_an_episode_comes_back_with_the_same_values(tmp_path):
    run = record(tmp_path / "run", ROWS, TOKENS, TURNS)
    assert export(run, tmp_path / "out") == 2
    traces = [json.loads(line) for line in (tmp_path / "out" / "traces.jsonl").read_text().splitlines()]
    for trace in traces:
        check(trace)
    first, second = traces[0]["turns"]
    assert first["prompt_token_ids"] == [1, 2, 3] and first["completion_token_ids"] == [5, 6]
    assert second["prompt_token_ids"] == [1, 2, 3, 5, 6, 7, 8] and second["loss_mask"] == [0] * 7 + [1]
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 6, "b": 7}}}
    asked = {"role": "user", "content": "What is 6 * 7?"}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert second["request"]["messages"] == [asked, answer, {"role": "tool", "name": "multiply", "content": "42"}]
    assert second["response"] == {
        "choices": [{"message": {"role": "assistant", "content": "It is 42."}, "finish_reason": "stop"}]
    }
    report = import_run(tmp_path / "out", tmp_path / "back")
    assert (report.format, report.rollouts, report.rejected) == ("openenv", 2, 0)
    assert rows(tmp_path / "back", *SAME, "group", "finish_reason") == rows(run, *SAME, "group", "finish_reason")
    assert of_tokens(tmp_path / "back") == of_tokens(run)
    known = ("sample", "turn", "role", "name", "arguments")
    for one in (run, tmp_path / "back"):
        turns = cavesson.open(one).arrow("turns", [*known]).to_pylist()
        assert [tuple(turn[name] for name in known) for turn in turns if turn["sample"] == 0] == [
            (0, 0, "assistant", None, None),
            (0, 1, "tool", "multiply", '{"a": 6, "b": 7}'),
            (0, 2, "assistant", None, None),
        ]


SPANS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 99), st.integers(-80, 0), st.booleans()), min_size=1, max_size=4),
        st.lists(st.integers(0, 99), min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
"""Stretches that were sampled, with log-probabilities in eighths and whether each token was learned; and others."""


@given(st.lists(st.tuples(st.lists(st.integers(0, 99), min_size=1, max_size=3), SPANS), min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_any_tokens_come_back(tmp_path_factory, rollouts):
    folder = tmp_path_factory.mktemp("openenv")
    tokens: dict[str, list] = {name: [] for name in TOKENS}
    for _, spans in rollouts:
        flat = []
        for number, (sampled, others) in enumerate(spans):
            flat += [(one, "sampled", learned, logprob / 8) for one, logprob, learned in sampled]
            flat += [(one, None, False, None) for one in others] if number < len(spans) - 1 else []
        for name, values in zip(TOKENS, zip(*flat, strict=True), strict=True):
            tokens[name].append(list(values))
    texts = {"prompt": [f"p{i}" for i in range(len(rollouts))], "response": ["r"] * len(rollouts)}
    given = texts | {"prompt_ids": [ids for ids, _ in rollouts], "reward": [0.5] * len(rollouts)}
    run = record(folder / "run", given, tokens)
    export(run, folder / "out")
    for line in (folder / "out" / "traces.jsonl").read_text().splitlines():
        check(json.loads(line))
    import_run(folder / "out", folder / "back")
    same = ("step", "sample", "prompt", "response", "prompt_ids", "reward")
    assert rows(folder / "back", *same) == rows(run, *same)
    assert of_tokens(folder / "back") == of_tokens(run)


def test_held_out_responses_are_apart_and_an_empty_one_is_a_trace(tmp_path):
    texts = {"prompt": ["a", "b"], "response": ["", "c"], "prompt_ids": [[1], [2]], "reward": [0.0, 1.0]}
    tokens = {"token_id": [[], [3]], "source": [[], ["sampled"]], "sampler_logprob": [[], [-1.0]]}
    run = record(tmp_path / "run", texts | {"split": ["train", "eval"]}, tokens)
    assert export(run, tmp_path / "out") == 2
    for name, wanted in (("", (3, "train", "a", "", [1], 0.0)), ("held-out", (3, "eval", "b", "c", [2], 1.0))):
        check(json.loads((tmp_path / "out" / name / "traces.jsonl").read_text()))
        import_run(tmp_path / "out" / name / "traces.jsonl", tmp_path / f"back{name}")
        assert rows(tmp_path / f"back{name}", "step", "split", "prompt", "response", "prompt_ids", "reward") == [wanted]


@pytest.mark.parametrize(
    ("lacking", "said"),
    [("prompt_ids", "token ids of prompt and response"), ("sampler_logprob", "the sampler's log-probability")],
)
def test_what_a_trace_needs_and_a_rollout_lacks_is_said(tmp_path, lacking, said):
    given = {name: values for name, values in ROWS.items() if name != lacking}
    tokens = {name: values for name, values in TOKENS.items() if name != lacking}
    run = record(tmp_path / "run", given, tokens)
    with pytest.raises(UserError, match=rf"step 3, sample 0: a trace of OpenEnv needs.*{said}"):
        export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_contract_of_harbor_has_rewards_by_part_and_the_turns_to_train_on(tmp_path):
    turn = {"prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-1.0], "loss_mask": [0, 1]}
    said = {"request": {"messages": [{"role": "user", "content": "Q"}]}}
    said |= {"response": {"choices": [{"message": {"role": "assistant", "content": "A"}, "finish_reason": "stop"}]}}
    audit = [{**turn, "turn": 0, "trainable": True}, {**turn, "turn": 1, "discarded": True}]
    contract = {"schema_version": 1, "task_id": "t", "reward": 1.0, "rewards": {"tests": 1.0, "style": 0.0}}
    contract |= {"trace_entries": [turn | said], "turns": audit}
    lines(tmp_path / "traces.jsonl", contract)
    import_run(tmp_path / "traces.jsonl", tmp_path / "run")
    columns = ("prompt", "response", "reward", "reward_parts")
    assert rows(tmp_path / "run", *columns) == [("[user]\nQ", "[assistant]\nA", 1.0, {"tests": 1.0, "style": 0.0})]


def test_the_reward_of_the_last_turn_is_that_of_a_trace_without_one(tmp_path):
    turn = {"prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-1.0], "loss_mask": [0, 1]}
    more = turn | {"prompt_token_ids": [1, 2, 3], "loss_mask": [0, 0, 0, 1], "reward": 0.25}
    lines(tmp_path / "traces.jsonl", {"schema_version": 1, "turns": [turn | {"reward": None}, more]})
    import_run(tmp_path / "traces.jsonl", tmp_path / "run")
    assert rows(tmp_path / "run", "reward") == [(0.25,)]
