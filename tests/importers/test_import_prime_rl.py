"""prime-rl's folders of traces, and its streams with what is annotated later."""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from import_helpers import lines, rows

import cavesson
from cavesson.importers import import_run
from cavesson.importers.prime_annotations import Annotations


def prime_node(role: str, text: str, ids: list[int], sampled: bool, parent: int | None, **more: Any) -> dict:
    mask = [sampled and i > 0 for i in range(len(ids))]  # an assistant's first token is the template's
    node = {"message": {"role": role, "content": text}, "token_ids": ids, "mask": mask, "sampled": sampled}
    return node | {"parent": parent, "logprobs": [-0.5] * sum(mask)} | more


def prime_episode(**changes: Any) -> dict[str, Any]:
    """One trace of two paths: the second answer was tried twice."""
    nodes = [
        prime_node("user", "Q", [1, 2], False, None),
        prime_node("assistant", "A", [3, 4], True, 0, advantages=[1.5], reference_logprobs=[-0.25]),
        prime_node("tool", "T", [5], False, 1),
        prime_node("assistant", "B", [6, 7, 8], True, 2, advantages=[1.5, 1.5]),
        prime_node("assistant", "C", [6, 9], True, 2),
    ]
    trace = {"id": "t", "nodes": nodes, "rewards": {"right": {"score": 1.0, "weight": 2.0}, "short": None}}
    trace |= {"task": {"type": "T", "data": {}}, "calls": [{"node": 4, "finish_reason": "length"}], "ok": True}
    run = {"type": "train", "id": "r", "work": {"type": "train", "step": 7}}
    return {"id": "e", "env": {"id": "maths"}, "ok": True, "run": run, "traces": [trace]} | changes


def test_prime_rl(tmp_path):
    folder = tmp_path / "run_1" / "rollouts" / "step_7"
    for part in ("all", "effective"):
        lines(folder / "train" / part / "traces.jsonl", prime_episode())
    lines(folder / "eval" / "all" / "traces.jsonl", prime_episode(run=None))
    (tmp_path / "run_1" / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    report = import_run(tmp_path / "run_1", tmp_path / "run")
    assert (report.format, report.files, report.rollouts, report.rejected) == ("prime-rl", 2, 4, 0)
    found = rows(tmp_path / "run", "step", "split", "prompt", "response", "reward", "reward_parts", "finish_reason")
    first, second = "[assistant]\nA\n\n[tool]\nT\n\n[assistant]\nB", "[assistant]\nA\n\n[tool]\nT\n\n[assistant]\nC"
    wanted = [
        (7, split, "[user]\nQ", r, 2.0, {"right": 1.0}, "length")
        for split in ("eval", "train")
        for r in (first, second)
    ]
    assert found == wanted
    row, tokens = cavesson.open(tmp_path / "run").rollout(7, 0)
    # From the first sampled token on; the template's and the tool's are masked.
    assert row["prompt_ids"] == [1, 2, 3]
    assert tokens["token_id"].to_pylist() == [4, 5, 6, 7, 8]
    assert tokens["learned"].to_pylist() == [True, False, False, True, True]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, None, None, -0.5, -0.5]
    assert tokens["ref_logprob"].to_pylist() == [-0.25, None, None, None, None]
    assert tokens["advantage"].to_pylist() == [1.5, None, None, 1.5, 1.5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"traces": [], "errors": [{"type": "Timeout"}]}, 'no traces; its errors: [{"type": "Timeout"}]'),
        ({"traces": [{"nodes": [], "rewards": {"right": None}, "task": {}}]}, "the trace was not scored"),
        ({"traces": [{"nodes": [{"parent": 0}], "rewards": {"r": 1}}]}, "a node's 'parent' is not an earlier node"),
        ({"run": {"work": {"type": "train", "step": -1}}}, "names its step"),
        (
            {"traces": [{"nodes": [prime_node("a", "A", [1, 2], True, None, logprobs=5)], "rewards": {"r": 1}}]},
            "a node's list of tokens is 5",
        ),
    ],
)
def test_what_is_wrong_with_an_episode_is_said(tmp_path, changes, message):
    lines(tmp_path / "traces.jsonl", prime_episode(**changes), prime_episode())
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.rollouts, report.rejected) == (2, 1)
    assert message in report.quotes[0]


def test_odd_values_in_an_episode_do_not_end_the_import(tmp_path):
    message = {"role": "assistant", "content": "A", "reasoning_content": 1, "tool_calls": 5}
    node = prime_node("assistant", "A", [1, 2], True, None, message=message, mask=[True, None])
    trace = {"nodes": [node], "rewards": {"right": 1.0}}
    lines(tmp_path / "traces.jsonl", prime_episode(traces=[trace], group={"id": "\ud800"}))
    import_run(tmp_path, tmp_path / "run")
    assert rows(tmp_path / "run", "response") == [("[assistant]\n1\nA\n5",)]
    tokens = cavesson.open(tmp_path / "run").rollout(7, 0)[1]
    assert tokens["learned"].to_pylist() == [True, False]


def prime_update(trace: str, info: dict | None = None, **tokens: list) -> dict[str, Any]:
    branches = [{"index": 0, **tokens}] if tokens else []
    return {"version": 1, "trace_id": trace, "info": info or {}, "branches": branches}


def prime_stream(folder: Path, layout: str) -> Path:
    """A stream of two episodes with annotations of the first; as it is written live, or once it is complete."""
    traces = folder / "monitors" / "file" / "traces"
    episodes = [prime_episode(id=f"e{n}") for n in range(2)]
    for number, episode in enumerate(episodes):
        trace = episode["traces"][0] = copy.deepcopy(episode["traces"][0]) | {"id": f"t{number}"}
        trace["info"] = {"kind": "train", "arrival": {"step": 7 + 3 * number}}
    shipped = {"effective": True, "ship": {"step": 8}, "advantage": 0.5}
    advantages = prime_update("t0", shipped, advantages=[9, 9, 9, 0.5, 9, 9, 0.25, 0.125])
    # The first path has the tokens 1 2 | 3 4 | 5 | 6 7 8; the trainer knows those that were sampled.
    none = [None] * 3
    logprobs = prime_update("t0", trainer_logprobs=[*none, -1.5, None, None, -2.5, -3.5], entropies=[*none, 0.5])
    index = {"trace_id": "t0", "chunk": 0, "offset": 0, "info": shipped}
    if layout == "flat":
        lines(traces / "stream.jsonl", *episodes)
        lines(traces / "annotations" / "orch.jsonl", advantages)
        lines(traces / "annotations" / "trainer.jsonl", logprobs)
    else:
        lines(traces / "stream" / "00000.jsonl", episodes[0])
        lines(traces / "stream" / "00001.jsonl", episodes[1])
        lines(traces / "annotations" / "orch" / "00000.jsonl", prime_update("t0", advantages=[0] * 8), advantages)
        lines(traces / "annotations" / "trainer" / "00000.jsonl", logprobs)
        lines(traces / "annotations" / "orch.index.jsonl", index)
    lines(traces / "stream.index.jsonl", {"id": "e0", "chunk": 0, "offset": 0}, {"id": "e1", "chunk": 1, "offset": 0})
    if layout == "sealed":
        for path in [*traces.glob("stream/*.jsonl"), *traces.glob("annotations/*/*.jsonl")]:
            seal(path)
    return traces


def seal(path: Path) -> None:
    """Compress as prime-rl does: frames of their own, and a table of them in a frame that readers skip."""
    content = path.read_bytes()
    frames = [pa.compress(content[i : i + 100], "zstd", asbytes=True) for i in range(0, len(content), 100)]
    table = b"\x5e\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"\x00" * 9
    path.with_name(f"{path.name}.zst").write_bytes(b"".join(frames) + table)
    path.unlink()


@pytest.mark.parametrize("layout", ["flat", "live", "sealed"])
@pytest.mark.parametrize("at", ["run", "traces"])
def test_a_stream_of_prime_rl_with_what_was_annotated_later(tmp_path, layout, at):
    traces = prime_stream(tmp_path / "theirs", layout)
    report = import_run(tmp_path / "theirs" if at == "run" else traces, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("prime-rl", 4, 0)
    check_stream(tmp_path / "run")


def check_stream(run: Path) -> None:
    assert [row[:2] for row in rows(run, "step", "reward")] == [(7, 2.0)] * 4
    row, tokens = cavesson.open(run).rollout(7, 0)
    assert tokens["logprob"].to_pylist() == [-1.5, None, None, -2.5, -3.5]
    assert tokens["advantage"].to_pylist() == [0.5, None, None, 0.25, 0.125]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, None, None, -0.5, -0.5]
    # Values that end early are of no node that they do not cover.
    assert tokens["entropy"].to_pylist() == [0.5, None, None, None, None]
    info = json.loads(row["extra"])["trace"]["info"]
    assert info == {"kind": "train", "arrival": {"step": 7}, "effective": True, "ship": {"step": 8}, "advantage": 0.5}
    _, later = cavesson.open(run).rollout(7, 2)
    assert later["logprob"].null_count == 5 and later["advantage"].to_pylist() == [1.5, None, None, 1.5, 1.5]


@pytest.mark.parametrize("platform", ["linux", "win32"])
def test_annotations_that_come_later_are_read_beside_the_earlier_ones(tmp_path, monkeypatch, platform):
    file = tmp_path / "annotations" / "orch.jsonl"
    found = Annotations()
    monkeypatch.setattr(sys, "platform", platform)
    if platform == "win32":
        monkeypatch.delattr(os, "pread")
    for number in range(3):
        lines(file, *(prime_update(f"t{n}", {f"seen {n}": n}) for n in range(number + 1)))
        assert found.read([tmp_path / "stream.jsonl"], last=False) == []
        traces = [{"id": f"t{n}"} for n in (2, 0, 1)]
        found.add_to({"traces": traces})
        assert traces == [{"id": f"t{n}", **({"info": {f"seen {n}": n}} if n <= number else {})} for n in (2, 0, 1)]


def test_broken_annotations_are_rejected_and_stop_nothing(tmp_path):
    traces = prime_stream(tmp_path / "theirs", "live")
    with (traces / "annotations" / "orch" / "00000.jsonl").open("a") as file:
        file.write('{"trace_id": 1}\nno\n[]\n{"trace_id": "t1", "info": 3, "branches": [{"index": 7}, {"index": 0, ')
        file.write('"advantages": "x"}, 4]}\n{"trace_id": "t1", "bran')
    report = import_run(tmp_path / "theirs", tmp_path / "run")
    assert (report.rollouts, report.rejected) == (4, 4)
    assert all("orch" in quote for quote in report.quotes)
    check_stream(tmp_path / "run")


def test_files_of_annotations_that_cannot_be_read_stop_nothing(tmp_path):
    orch = prime_stream(tmp_path / "theirs", "live") / "annotations" / "orch"
    (orch / "00001.jsonl.zst").write_bytes(b"no frame")
    (orch / "00002.jsonl").mkdir()
    (orch / "00003.jsonl").write_text('\n{"trace_id": "t1", "info": ' + '{"a": ' * 600 + "1" + "}" * 600 + "}\n")
    report = import_run(tmp_path / "theirs", tmp_path / "run")
    assert (report.rollouts, report.rejected) == (2, 3)
    assert sorted((quote.split(":")[0], quote.split(": ")[1]) for quote in report.quotes) == [
        (str(orch / "00001.jsonl"), "the file cannot be read"),
        (str(orch / "00002.jsonl"), "the file cannot be read"),
        (f"{orch.parents[1] / 'stream' / '00001.jsonl'}, line 1", "lists or objects are nested too deeply to be read"),
    ]
