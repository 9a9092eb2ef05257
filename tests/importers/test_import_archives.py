"""Logs of Inspect, dumps of slime and trajectories of ART, in the shape in which these tools write them."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.importers import import_run
from cavesson.importers.archives import archive_rows

ASKED = {"id": "1", "role": "user", "content": "Weather in Hue?", "source": "input"}
CALL = {
    "id": "2", "role": "assistant", "content": "I look.", "source": "generate", "model": "openai/m",
    "tool_calls": [{"id": "c1", "function": "weather", "arguments": {"city": "Hue"}, "type": "function"}],
}  # fmt: skip
RESULT = {
    "id": "3", "role": "tool", "content": "attachment://ab12", "tool_call_id": "c1", "function": "weather",
    "error": {"type": "timeout", "message": "took too long"},
}  # fmt: skip
ANSWER = {"id": "4", "role": "assistant", "content": "Rain.", "source": "generate"}


def sample(**changes: Any) -> dict[str, Any]:
    return {
        "id": "hue", "epoch": 2, "input": "Weather in Hue?", "target": ["rain", "wet"],
        "messages": [ASKED, CALL, RESULT, ANSWER],
        "output": {
            "model": "openai/m", "completion": "Rain.",
            "choices": [{"message": ANSWER, "stop_reason": "max_tokens"}], "usage": {"total_tokens": 9},
        },
        "scores": {
            "match": {"value": "C", "answer": "Rain.", "explanation": "It says rain."},
            "judge": {"value": {"tone": 0.25, "length": True, "note": "long"}},
        },
        "events": [{"event": "model"}], "attachments": {"ab12": "no answer"}, "store": {"seen": 1},
    } | changes  # fmt: skip


def evaluation(path: Path, *samples: dict[str, Any], ended: bool = True) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {"version": 2, "status": "success", "eval": {"task": "weather", "model": "openai/m", "config": {}}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("_journal/start.json", json.dumps(header))
        for one in samples:
            archive.writestr(f"samples/{one['id']}_epoch_{one['epoch']}.json", json.dumps(one))
        archive.writestr("summaries.json", "[]")
        if ended:
            archive.writestr("header.json", json.dumps(header))
    return path


def test_inspect(tmp_path):
    evaluation(tmp_path / "step_40" / "2026_weather.eval", sample(), sample(id="other", scores=None, target="x"))
    report = import_run(tmp_path / "step_40", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("inspect", 2, 0)
    found = rows(
        tmp_path / "run", "step", "split", "prompt", "reward", "reward_parts", "reward_reasons", "ground_truth"
    )
    parts = {"match": 1.0, "judge/tone": 0.25, "judge/length": 1.0}
    asked = "[user]\nWeather in Hue?"
    assert found == [
        (40, "eval", asked, 2.25, parts, {"match": "It says rain."}, '["rain", "wet"]'),
        (40, "eval", asked, None, None, None, "x"),
    ]
    assert rows(tmp_path / "run", "finish_reason", "turns", "calls", "call_errors")[0] == ("length", 2, 1, 1)
    turns = cavesson.open(tmp_path / "run").turns(40, 0).to_pylist()
    assert [turn["role"] for turn in turns] == ["assistant", "tool", "assistant"]
    tool = {name: turns[1][name] for name in ("name", "arguments", "text", "error")}
    assert tool == {
        "name": "weather", "arguments": '{"city": "Hue"}', "text": "no answer", "error": "took too long",
    }  # fmt: skip
    extra = json.loads(rows(tmp_path / "run", "extra")[0][0])
    assert (extra["epoch"], extra["store"], extra["eval"]) == (2, {"seen": 1}, {"task": "weather", "model": "openai/m"})
    assert extra["scores"]["judge"]["value"]["note"] == "long"
    assert extra["output"]["usage"] == {"total_tokens": 9}


def test_an_answer_of_inspect_with_log_probabilities_has_tokens(tmp_path):
    content = [{"token": "Ra", "logprob": -0.5}, {"token": "in.", "logprob": -0.25}]
    choice = {"message": ANSWER, "stop_reason": "stop", "logprobs": {"content": content}}
    one = sample(messages=[ASKED, ANSWER], output={"model": "m", "choices": [choice]})
    import_run(evaluation(tmp_path / "log.eval", one), tmp_path / "run")
    _, tokens = cavesson.open(tmp_path / "run").rollout(0, 0)
    assert tokens["token"].to_pylist() == ["Ra", "in."]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, -0.25]


def test_an_evaluation_that_has_not_ended_is_read_as_far_as_it_goes(tmp_path):
    report = import_run(evaluation(tmp_path / "log.eval", sample(), ended=False), tmp_path / "run")
    assert report.rollouts == 1
    assert "the evaluation has not ended" in report.quotes[0]


def slime_sample(**changes: Any) -> dict[str, Any]:
    return {
        "group_index": 5, "index": 21, "prompt": "1+1?", "tokens": [9, 8, 1, 2, 3], "response": "It is 2",
        "response_length": 3, "label": "2", "reward": 1.0, "loss_mask": [1, 0, 1], "weight_versions": ["7", "8"],
        "rollout_log_probs": [-0.5, 0.0, -0.25], "teacher_log_probs": None, "status": "completed",
        "metadata": {"level": 3}, "remove_sample": False, "spec_info": {"spec_verify_ct": 0},
    } | changes  # fmt: skip


def test_slime(tmp_path):
    (tmp_path / "in").mkdir()
    other = slime_sample(reward={"score": -1.0, "acc": False}, loss_mask=None, status="truncated")
    torch.save({"rollout_id": 3, "samples": [slime_sample(), other]}, tmp_path / "in" / "3.pt")
    torch.save({"rollout_id": 3, "samples": [slime_sample(remove_sample=True)]}, tmp_path / "in" / "eval_3.pt")
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("slime", 3, 0)
    found = rows(tmp_path / "run", "split", "prompt", "response", "prompt_ids", "reward", "finish_reason", "length")
    same = ("1+1?", "It is 2", [9, 8])
    assert sorted(found) == [
        ("eval", *same, 1.0, "stop", 0), ("train", *same, -1.0, "length", 3), ("train", *same, 1.0, "stop", 2),
    ]  # fmt: skip
    assert rows(tmp_path / "run", "step", "ground_truth", "policy_version")[0] == (3, "2", 7)
    sample = next(
        n
        for n, split, reward in rows(tmp_path / "run", "sample", "split", "reward")
        if (split, reward) == ("train", 1.0)
    )
    _, tokens = cavesson.open(tmp_path / "run").rollout(3, sample)
    assert tokens["token_id"].to_pylist() == [1, 2, 3]
    assert tokens["learned"].to_pylist() == [True, False, True]
    assert tokens["source"].to_pylist() == ["sampled", None, "sampled"]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, 0.0, -0.25]
    extra = json.loads(rows(tmp_path / "run", "extra")[0][0])
    assert (extra["group_index"], extra["metadata"]) == (5, {"level": 3})


class Harmful:
    def __reduce__(self):
        return (open, ("made-by-the-dump", "w"))


def test_no_code_of_a_dump_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"rollout_id": 3, "samples": [slime_sample(metadata=Harmful())]}, tmp_path / "3.pt")
    with pytest.raises(
        UserError, match=r"it contains (io|_io|builtins)\.open, and only texts, numbers, lists and dicts"
    ):
        import_run(tmp_path / "3.pt", tmp_path / "run")
    assert not (tmp_path / "made-by-the-dump").exists()


def trajectory(**changes: Any) -> dict[str, Any]:
    content = [{"token": "token_id:11", "logprob": -0.5}, {"token": "token_id:12", "logprob": -1.5}]
    said = {"role": "assistant", "content": "Rain."}
    choice = {"finish_reason": "length", "index": 0, "message": said, "logprobs": {"content": content}}
    return {
        "messages_and_choices": [{"role": "user", "content": "Weather?"}, choice], "reward": 0.5,
        "metrics": {"turns": 1, "right": True}, "metadata": {"city": "Hue"}, "logs": ["a"], "tools": None,
    } | changes  # fmt: skip


def check_art(run: Path, has_tokens: bool = True) -> None:
    found = rows(run, "step", "split", "prompt", "response", "reward", "reward_parts")
    parts = {"turns": 1.0, "right": 1.0}
    assert found == [(12, "train", "[user]\nWeather?", "[assistant]\nRain.", 0.5, parts)]
    extra = json.loads(rows(run, "extra")[0][0])
    assert (extra["metadata"], extra["logs"]) == ({"city": "Hue"}, ["a"])
    if has_tokens:
        assert rows(run, "finish_reason") == [("length",)]
        _, tokens = cavesson.open(run).rollout(12, 0)
        assert tokens["token_id"].to_pylist() == [11, 12]
        assert tokens["sampler_logprob"].to_pylist() == [-0.5, -1.5]


def test_art_lines_of_groups(tmp_path):
    lines(tmp_path / "trajectories" / "train" / "0012.jsonl", {"trajectories": [trajectory()]})
    assert import_run(tmp_path / "trajectories", tmp_path / "run").format == "art"
    check_art(tmp_path / "run")


def test_art_tables(tmp_path):
    one = trajectory()
    row = {
        "format_version": 2, "group_index": 0, "trajectory_index": 0, "group_json": '{"metadata": {"kind": "k"}}',
        "trajectory_json": json.dumps(one), "reward": 0.5, "metrics": json.dumps(one["metrics"]),
        "messages": [{"role": "user", "content": "Weather?", "trainable": False}],
    }  # fmt: skip
    empty = dict.fromkeys(row) | {"format_version": 2, "group_index": 1, "group_json": "{}"}
    for split in ("train", "val"):
        folder = tmp_path / "trajectories" / split
        folder.mkdir(parents=True)
        table = [row, empty] if split == "train" else [empty]
        pq.write_table(pa.Table.from_pylist(table, pa.Table.from_pylist([row]).schema), folder / "0012.parquet")
    report = import_run(tmp_path / "trajectories", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("art", 1, 0)
    check_art(tmp_path / "run")
    assert json.loads(rows(tmp_path / "run", "extra")[0][0])["group"] == {"metadata": {"kind": "k"}}


def test_art_first_tables(tmp_path):
    flat = {"role": "user", "content": "Weather?", "tool_calls": None, "tool_call_id": None, "trainable": False}
    said = flat | {"role": "assistant", "content": "Rain.", "trainable": True}
    row = {
        "group_index": 0, "reward": 0.5, "metrics": '{"turns": 1, "right": true}', "metadata": '{"city": "Hue"}',
        "tools": None, "logs": ["a"], "messages": [flat, said],
    }  # fmt: skip
    (tmp_path / "train").mkdir()
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train" / "0012.parquet")
    assert import_run(tmp_path / "train", tmp_path / "run").format == "art"
    check_art(tmp_path / "run", has_tokens=False)


def test_rollout_summaries_without_texts_are_named(tmp_path):
    steps = [{"step_idx": 0, "ob_len": 5, "ac_len": 7, "reward": 1.0, "episode_done": True, "metrics": {}, "logs": {}}]
    record = {"schema_version": 1, "split": "train", "iteration": 3, "group_idx": 0, "traj_idx": 0, "steps": steps}
    lines(tmp_path / "train_rollout_summaries.jsonl", record | {"total_reward": 1.0, "final_ob_len": 12})
    with pytest.raises(UserError, match="rollout summaries of tinker-cookbook, which have rewards and lengths but no"):
        import_run(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA])
def test_a_damaged_archive_is_broken_or_as_it_was(tmp_path, compression):
    """Each byte in turn has another value, or is the last one."""
    path, samples = tmp_path / "a.eval", [{"id": 1, "text": "a text of some length " * 3}, {"id": 2}]
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("header.json", json.dumps({"eval": {}}))
        for one in samples:
            archive.writestr(f"samples/{one['id']}.json", json.dumps(one))
    whole, broken = path.read_bytes(), 0
    for place in range(len(whole)):
        for damaged in (whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :], whole[:place]):
            path.write_bytes(damaged)
            try:
                found = list(archive_rows(path))
            except ValueError:
                broken += 1
            else:  # names and times are not checked by a sum
                assert all(any(one.items() <= row.items() for one in samples) for row in found)
    assert broken > len(whole)
