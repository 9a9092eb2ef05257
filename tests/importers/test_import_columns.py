"""Columns of any table: nested ones, several rollouts per record, scores per token, and numbers in other forms."""

import json
from pathlib import Path
from typing import Any

import pytest
from import_helpers import lines, rows
from typer.testing import CliRunner

import cavesson
from cavesson.cli import app
from cavesson.errors import UserError
from cavesson.importers import Tokenizer, import_run

PLAIN = {"prompt": "p", "response": "r", "reward": 1.0, "step": 1, "group": 1}


def imported(tmp_path: Path, *records: Any, **maps: str) -> Any:
    lines(tmp_path / "in.jsonl", *records)
    return import_run(tmp_path / "in.jsonl", tmp_path / "run", "plain", maps)


def extras(tmp_path: Path) -> list[Any]:
    return [json.loads(extra) if extra else None for (extra,) in rows(tmp_path / "run", "extra")]


def test_columns_inside_objects_and_lists(tmp_path):
    record = {
        "step": 1, "messages": [{"role": "user", "content": "q"}], "choices": [{"text": "a"}],
        "reward_model": {"style": "rule", "ground_truth": "4"}, "scores": {"total": 0.5}, "a.b": "x",
    }  # fmt: skip
    names = {"prompt": "messages.0.content", "response": "choices.0.text", "reward": "scores.total"}
    report = imported(tmp_path, record, **names, ground_truth="reward_model.ground_truth", finish_reason="a.b")
    assert (report.rollouts, report.rejected, report.notes) == (1, 0, [])
    found = rows(tmp_path / "run", "prompt", "response", "reward", "ground_truth", "finish_reason")
    assert found == [("q", "a", 0.5, "4", "x")]
    # The objects are kept whole; a column whose own name has a dot is used up.
    assert extras(tmp_path) == [{key: record[key] for key in ("messages", "choices", "reward_model", "scores")}]


def test_a_column_that_no_record_has_is_an_error(tmp_path):
    lines(tmp_path / "in.jsonl", PLAIN, PLAIN | {"more": 1})
    message = "--map logprob=lp: no record has this column; columns are prompt, response, reward, step, group, more"
    with pytest.raises(UserError, match=message):
        import_run(tmp_path / "in.jsonl", tmp_path / "run", columns={"logprob": "lp"})
    assert import_run(tmp_path / "in.jsonl", tmp_path / "run", columns={"ground_truth": "more"}).rollouts == 2


def test_a_value_that_does_not_fit_is_kept_and_said(tmp_path):
    report = imported(tmp_path, PLAIN | {"lp": "high"}, PLAIN | {"lp": [-1.0]}, logprob="lp")
    assert report.notes == ["'lp' does not fit logprob and is kept in extra (1 rollout)"]
    assert extras(tmp_path) == [{"lp": "high"}, None]


def test_several_responses_of_a_record_are_rollouts(tmp_path):
    shared = {"q": [{"role": "user", "content": "2+2?"}], "it": 3, "note": "both"}
    several = {"answers": ["4", "5", "6"], "scores": [1.0, True, "0.25"], "ids": [[1], [2, 3], [4]], "of": [7, 8, 9]}
    report = imported(
        tmp_path, shared | several, prompt="q", response="answers", reward="scores", step="it", token_id="ids"
    )
    assert (report.rollouts, report.rejected) == (3, 0)
    found = rows(tmp_path / "run", "step", "prompt", "response", "reward", "length")
    wanted = [("4", 1.0, 1), ("5", 1.0, 2), ("6", 0.25, 1)]
    assert found == [(3, "[user]\n2+2?", *one) for one in wanted]
    assert extras(tmp_path) == [{"note": "both", "of": number} for number in (7, 8, 9)]


def test_scores_per_token_are_summed(tmp_path):
    scores = {"reward": [0.0, -0.25, 1.0]}
    report = imported(tmp_path, PLAIN | scores | {"token_id": [7, 8, 9]}, PLAIN | scores, PLAIN | {"reward": [None, 2]})
    assert rows(tmp_path / "run", "reward") == [(0.75,), (0.75,), (2.0,)]
    assert "'reward' has one number per token, and the reward is their sum (3 rollouts)" in report.notes
    _, tokens = cavesson.open(tmp_path / "run").rollout(1, 0)
    assert tokens["token_reward"].to_pylist() == scores["reward"]
    assert extras(tmp_path) == [None, scores, {"reward": [None, 2]}]


@pytest.mark.parametrize("scores", [[], [None], ["a"], [[1.0]], {}])
def test_what_is_no_score_is_none(tmp_path, scores):
    assert imported(tmp_path, PLAIN, PLAIN | {"reward": scores}).rejected == 1


def test_truth_values_and_numbers_in_quotes_are_parts(tmp_path):
    line = {"input": "p", "output": "r", "score": "0.5", "acc": True, "format": "0.25", "pred": "17", "note": "n"}
    lines(tmp_path / "1.jsonl", line, line | {"acc": False, "format": "-1", "pred": "x + 1", "score": False})
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts) == ("verl", 2)
    assert rows(tmp_path / "run", "step", "reward", "reward_parts") == [
        (1, 0.5, {"acc": 1.0, "format": 0.25}),
        (1, 0.0, {"acc": 0.0, "format": -1.0}),
    ]
    # Not every prediction is a number, so none of them is a part.
    assert extras(tmp_path) == [{"pred": "17", "note": "n"}, {"pred": "x + 1", "note": "n"}]


def test_columns_become_parts(tmp_path):
    record = PLAIN | {"ok": True, "scores": {"a": 1, "b": "0.5", "c": "n", "d": False}}
    names = {"reward_parts": "scores", "reward_parts.ok": "ok"}
    imported(tmp_path, record, **names)
    assert rows(tmp_path / "run", "reward_parts") == [({"a": 1.0, "b": 0.5, "d": 0.0, "ok": 1.0},)]
    assert extras(tmp_path) == [{"scores": record["scores"]}]


def test_a_group_may_be_named_by_a_text(tmp_path):
    records = [PLAIN | {"uid": uid} for uid in ("a", "b", "a")]
    imported(tmp_path, *records, group="uid")
    one, other, again = sorted((extra["uid"], group) for extra, (group,) in zip(
        extras(tmp_path), rows(tmp_path / "run", "group"), strict=True
    ))  # fmt: skip
    assert one == other and again[1] != one[1]


WORDS = ["<s>", "two", "+", "four", "!"]
VOCABULARY = Tokenizer(WORDS, [f" {word}" for word in WORDS], lambda ids: " ".join(WORDS[i] for i in ids))


def open_instruct(**changes: Any) -> dict[str, Any]:
    return {
        "step": 3, "sample_idx": 0, "prompt_idx": 0, "prompt_tokens": [1, 2, 1], "response_tokens": [3, 4],
        "reward": 1.0, "advantage": 0.5, "finish_reason": "stop", "dataset": "sums", "logprobs": [-1.0, -0.5],
    } | changes  # fmt: skip


def test_token_ids_without_a_vocabulary_are_said(tmp_path):
    lines(tmp_path / "in" / "run_rollouts_000000.jsonl", open_instruct())
    lines(tmp_path / "in" / "run_metadata.jsonl", {"run_name": "run", "model_name": "m"})
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert (report.format, report.rollouts) == ("open-instruct", 1)
    assert rows(tmp_path / "run", "step", "prompt", "response", "prompt_ids") == [(3, "", "", [1, 2, 1])]
    assert report.notes == [
        "the source has token ids in place of texts: import again with --tokenizer m, which run_metadata.jsonl names "
        "(1 rollout)",
        "1 file not read: run_metadata.jsonl",
    ]
    _, tokens = cavesson.open(tmp_path / "run").rollout(3, 0)
    assert tokens.select(["token_id", "sampler_logprob"]).to_pydict() == {
        "token_id": [3, 4], "sampler_logprob": [-1.0, -0.5]
    }  # fmt: skip


def test_token_ids_with_a_vocabulary_can_be_read(tmp_path):
    lines(tmp_path / "in" / "run_rollouts_000000.jsonl", open_instruct(), open_instruct(response_tokens=[5]))
    with pytest.raises(IndexError):
        VOCABULARY.decode([5])
    safe = VOCABULARY._replace(decode=lambda ids: " ".join(WORDS[i] for i in ids if i < len(WORDS)))
    report = import_run(tmp_path / "in", tmp_path / "run", tokenizer=safe)
    assert rows(tmp_path / "run", "prompt", "response") == [("two + two", "four !"), ("two + two", "")]
    assert report.notes == ["a token id is not in the vocabulary: this is the tokenizer of another model (1 rollout)"]
    vocabulary = cavesson.open(tmp_path / "run").vocabulary
    assert vocabulary["text"].to_pylist() == VOCABULARY.texts and vocabulary["token"].to_pylist() == WORDS


def test_the_tokenizer_of_a_model_writes_its_vocabulary(tmp_path):
    from cavesson.models.load import load_tokenizer

    tokenizer = load_tokenizer("tiny")
    ids = tokenizer("four é")["input_ids"]
    lines(tmp_path / "in.jsonl", {"prompt": "p", "reward": 1.0, "step": 0, "token_id": ids})
    command = ["import", str(tmp_path / "in.jsonl"), str(tmp_path / "run"), "--tokenizer", "tiny", "--format", "plain"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert rows(tmp_path / "run", "response") == [("four é",)]
    texts = cavesson.open(tmp_path / "run").vocabulary["text"].to_pylist()
    assert texts == [tokenizer.decode([i]) for i in range(len(tokenizer))]


def test_the_nearest_format_and_a_mapping_are_proposed(tmp_path):
    lines(tmp_path / "in" / "b.jsonl", {"step": 1, "prompt": "p", "completion": "c", "total_reward": 1.0})
    lines(tmp_path / "in" / "a.jsonl", {"step": 1, "loss": 0.5})
    with pytest.raises(UserError) as raised:
        import_run(tmp_path / "in", tmp_path / "run")
    first, second = str(raised.value).splitlines()
    assert first.endswith("(2 .jsonl files): b.jsonl has the columns step, prompt, completion, total_reward")
    assert second == (
        "the nearest format is trl, without advantage; to read any other table, name its columns: "
        "--map response=completion --map reward=total_reward"
    )
    maps = dict(word.split("=") for word in second.split()[-3:] if "=" in word)
    assert import_run(tmp_path / "in", tmp_path / "run", columns=maps).rollouts == 1


def test_everything_in_a_message_is_shown(tmp_path):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "look: "}, {"type": "image_url", "url": "cat.png"}]},
        {"role": "tool", "name": "eyes", "tool_call_id": "c1", "content": "a cat", "thinking": None},
    ]
    imported(tmp_path, PLAIN | {"prompt": prompt, "response": {"role": "assistant", "content": "Miaow"}})
    ((prompt, response),) = rows(tmp_path / "run", "prompt", "response")
    assert prompt == (
        '[user]\nlook: {"type": "image_url", "url": "cat.png"}\n\n'
        '[tool]\na cat\n{"name": "eyes", "tool_call_id": "c1"}'
    )  # fmt: skip
    assert response == "[assistant]\nMiaow"
