"""Every format, as its own tool writes it; what the tools write was read in their source."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.exporters.rl_logging_board import export
from cavesson.importers import FORMATS, import_run


def test_verl(tmp_path):
    line = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "acc": True, "format": 0.5, "pred": "two"}
    lines(tmp_path / "in" / "9.jsonl", line | {"step": 9}, line | {"step": 9, "gts": None})
    lines(tmp_path / "in" / "10.jsonl", line | {"step": 10, "gts": {"answer": 2}})
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert (report.format, report.files, report.rollouts, report.rejected) == ("verl", 2, 3, 0)
    found = rows(tmp_path / "run", "step", "sample", "prompt", "response", "reward", "reward_parts", "ground_truth")
    parts = {"acc": 1.0, "format": 0.5}
    assert found == [
        (9, 0, "1+1?", "2", 1.0, parts, "2"),
        (9, 1, "1+1?", "2", 1.0, parts, None),
        (10, 0, "1+1?", "2", 1.0, parts, '{"answer": 2}'),
    ]
    assert json.loads(rows(tmp_path / "run", "extra")[0][0]) == {"pred": "two"}
    # One prompt, one group.
    assert len(set(rows(tmp_path / "run", "group"))) == 1


def test_openrlhf_batch_inference(tmp_path):
    lines(tmp_path / "in.jsonl", {"input": "a", "output": "b", "reward": -1.5}, {"input": "a", "output": "c"})
    report = import_run(tmp_path / "in.jsonl", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("openrlhf", 1, 1)
    assert "line 2: 'reward' is missing" in report.quotes[0]
    assert rows(tmp_path / "run", "step", "prompt", "response", "reward") == [(0, "a", "b", -1.5)]


def test_openrlhf_table_of_samples(tmp_path):
    folder = tmp_path / "wandb" / "files" / "media" / "table" / "train"
    folder.mkdir(parents=True)
    for step in (2, 10):
        data = [[i, f"text {i}", 0.5 * i] for i in range(1, step + 1)]
        table = {"columns": ["global_step", "text", "reward"], "data": data, "ncols": 3, "nrows": len(data)}
        (folder / f"generated_samples_{step}_ab12.table.json").write_text(json.dumps(table))
    report = import_run(tmp_path / "wandb", tmp_path / "run")
    # The table of step 10 holds that of step 2.
    assert (report.format, report.files, report.rollouts) == ("openrlhf", 1, 10)
    assert rows(tmp_path / "run", "step", "response", "reward")[-1] == (10, "text 10", 5.0)


def nemo_line(**changes: Any) -> dict[str, Any]:
    """One sample of two prompt tokens, two sampled, one of the environment, one sampled, two of padding."""
    return {
        "content": [["Question? ", "Think", "Result", "Answer"]],
        "rewards": [1.0],
        "input_lengths": [6],
        "token_ids": [[5, 6, 7, 8, 9, 4, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 1, 0, 1, 0, 0]],
        "sample_loss_mask": [1.0],
        "advantages": [[0.0, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -1.0, -2.0, 0.0, -0.5, 0.0, 0.0]],
        "prev_logprobs": [[0.0, 0.0, -1.25, -2.0, 0.0, -0.5, 0.0, 0.0]],
        "idx": 0,
    } | changes


def test_nemo_rl(tmp_path):
    lines(tmp_path / "exp_001" / "train_data_step3.jsonl", nemo_line())
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    lines(tmp_path / "exp_001" / "val_data_step3.jsonl", {"content": [talk], "rewards": [0.25], "idx": 0})
    report = import_run(tmp_path / "exp_001", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("nemo-rl", 2, 0)
    found = rows(tmp_path / "run", "split", "prompt", "response", "prompt_ids", "reward", "length")
    assert found == [
        ("train", "Question? ", "Think\nResult\nAnswer", [5, 6], 1.0, 3),
        ("eval", "[user]\nQ", "[assistant]\nA", None, 0.25, None),
    ]
    _, tokens = cavesson.open(tmp_path / "run").rollout(3, 0)
    assert tokens["token_id"].to_pylist() == [7, 8, 9, 4]
    assert tokens["learned"].to_pylist() == [True, True, False, True]
    assert tokens["logprob"].to_pylist() == [-1.25, -2.0, 0.0, -0.5]
    assert tokens["sampler_logprob"].to_pylist() == [-1.0, -2.0, 0.0, -0.5]
    assert tokens["advantage"].to_pylist() == [0.5] * 4
    assert json.loads(rows(tmp_path / "run", "extra")[0][0]) == {"sample_loss_mask": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": ["high"]}, "'rewards' is \"high\", expected a number"),
        ({"token_loss_mask": [[1]]}, "not lists of the same length"),
        ({"token_ids": [[1.5] * 8]}, "token_id contains something that is not a number"),
        ({"content": [5]}, "'content' is 5, expected texts or messages"),
    ],
)
def test_what_is_wrong_with_a_line_of_nemo_rl_is_said(tmp_path, change, message):
    lines(tmp_path / "train_data_step1.jsonl", nemo_line(**change), nemo_line())
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.rollouts, report.rejected) == (1, 1)
    assert message in report.quotes[0]


@pytest.mark.parametrize("step", ["5", "5.0", 5.0, 5])
def test_a_step_may_be_a_text_or_a_float(tmp_path, step):
    columns = {"prompt": ["a"], "completion": ["b"], "f": [1.0], "advantage": [0.5]}
    completions(tmp_path / "trl" / "completions_5.parquet", step=[step], **columns)
    lines(tmp_path / "verl" / "5.jsonl", {"input": "a", "output": "b", "score": 1.0, "step": step})
    record = {"prompt": "a", "response": "b", "reward": 1.0, "step": step}
    lines(tmp_path / "plain" / "5.jsonl", record | {"token_id": [1]})
    lines(tmp_path / "rl-logging-board" / "5.jsonl", record)
    for format in ("trl", "verl", "plain", "rl-logging-board"):
        assert import_run(tmp_path / format, tmp_path / f"run {format}").rejected == 0
        assert rows(tmp_path / f"run {format}", "step") == [(5,)]
    # What goes back to this format is the value that came.
    export(tmp_path / "run rl-logging-board", tmp_path / "back")
    (file,) = (tmp_path / "back").glob("*.jsonl")
    assert json.loads(file.read_text())["step"] == step


@pytest.mark.parametrize("reward", ["-0.25", "-.25", "-2.5E-1", "-25e-2"])
def test_a_reward_may_be_a_number_written_as_text(tmp_path, reward):
    """``json.dumps(…, default=str)`` writes numpy's numbers in this way."""
    record = {"prompt": "a", "response": "b", "reward": reward, "step": 5}
    lines(tmp_path / "verl" / "5.jsonl", {"input": "a", "output": "b", "score": reward, "step": 5})
    lines(tmp_path / "openrlhf" / "out.jsonl", {"input": "a", "output": "b", "reward": reward})
    lines(tmp_path / "plain" / "5.jsonl", record | {"token_id": [1]})
    lines(tmp_path / "rl-logging-board" / "5.jsonl", record)
    for format in ("verl", "openrlhf", "plain", "rl-logging-board"):
        assert import_run(tmp_path / format, tmp_path / f"run {format}").rejected == 0
        assert rows(tmp_path / f"run {format}", "reward") == [(-0.25,)]
    export(tmp_path / "run rl-logging-board", tmp_path / "back")
    (file,) = (tmp_path / "back").glob("*.jsonl")
    assert json.loads(file.read_text())["reward"] == reward


@pytest.mark.parametrize("reward", ["", "high", "0x1p3", "1_0", "٣", "1,5", " 1", "nan", "-", ".", "e5", [], {}])
def test_what_is_no_number_is_no_reward(tmp_path, reward):
    good = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    lines(tmp_path / "5.jsonl", good, good | {"score": reward})
    assert import_run(tmp_path, tmp_path / "run").rejected == 1


@pytest.mark.parametrize("names", [("input", "output", "score"), ("prompt", "response", "reward")])
@pytest.mark.parametrize("missing", [None, math.nan])
def test_null_and_nan_are_a_response_that_no_reward_has_judged(tmp_path, names, missing):
    """TRL, for one, writes them for its rewards that return None; a reward is not made up, nor the response lost."""
    prompt, response, reward = names
    good = {prompt: "a", response: "b", reward: 1.0, "step": 1}
    lines(tmp_path / "in.jsonl", good, good | {reward: missing}, {prompt: "a", response: "b", "step": 1})
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.rollouts, report.rejected) == (2, 1)  # a line without the column is not one of this format
    assert rows(tmp_path / "run", "reward") == [(1.0,), (None,)]


@pytest.mark.parametrize("step", ["", "-1", "1e3", "1.5", "٣", "99999999999", 1.5, None, True, [5]])
def test_what_is_no_step_is_none(tmp_path, step):
    good = {"input": "a", "output": "b", "score": 1.0, "step": 1}
    lines(tmp_path / "in.jsonl", good, good | {"step": step})
    assert import_run(tmp_path, tmp_path / "run").rejected == 1


def completions(path: Path, **columns: list) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_trl(tmp_path):
    talk = [{"role": "user", "content": "Q"}]
    answer = [{"role": "assistant", "content": "A"}]
    columns = {"step": [5, 5], "prompt": [talk] * 2, "completion": [answer] * 2}
    rewards = {"right": [1.0, None], "short": [0.25, None], "note": ["n", None], "advantage": [0.5, 0.0]}
    completions(tmp_path / "out" / "completions" / "completions_00005.parquet", **columns, **rewards)
    report = import_run(tmp_path / "out", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("trl", 2, 0)
    found = rows(tmp_path / "run", "step", "prompt", "response", "reward", "reward_parts")
    # A response that no reward has judged has none, and its reward is not made up.
    unscored = (5, "[user]\nQ", "[assistant]\nA", None, None)
    assert found == [(*unscored[:3], 1.25, {"right": 1.0, "short": 0.25}), unscored]
    assert rows(tmp_path / "run", "extra")[0] == ('{"note": "n", "advantage": 0.5}',)


def test_plain_with_a_mapping(tmp_path):
    record = {"q": "a", "a": "b", "r": 2, "it": 4, "tok": ["x", "y"], "lp": [-1.0, -2.0], "ref": [-1.5, -2.5], "z": 1}
    lines(tmp_path / "in.jsonl", record, record | {"r": "no"})
    names = {"prompt": "q", "response": "a", "reward": "r", "step": "it", "token": "tok", "logprob": "lp"}
    report = import_run(tmp_path / "in.jsonl", tmp_path / "run", columns=names | {"ref_logprob": "ref"})
    assert (report.format, report.rollouts, report.rejected) == ("plain", 1, 1)
    found = rows(tmp_path / "run", "step", "prompt", "response", "reward", "length", "kl_k1", "extra")
    # kl_k1 = (−1 + 1.5) + (−2 + 2.5)
    assert found == [(4, "a", "b", 2.0, 2, 1.0, '{"z": 1}')]


def test_plain_parquet_without_a_step_is_step_0(tmp_path):
    completions(tmp_path / "t.parquet", prompt=["a"], response=["b"], reward=[0.5], group=[3], split=["eval"])
    assert import_run(tmp_path / "t.parquet", tmp_path / "run").format == "plain"
    assert rows(tmp_path / "run", "step", "group", "split", "reward") == [(0, 3, "eval", 0.5)]


def test_a_broken_table_is_kept_aside(tmp_path):
    completions(
        tmp_path / "in" / "completions_00001.parquet",
        step=[1],
        prompt=["a"],
        completion=["b"],
        r=[1.0],
        advantage=[0.0],
    )
    (tmp_path / "in" / "completions_00002.parquet").write_bytes(b"PAR1 half")
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert (report.rollouts, report.rejected) == (1, 1)
    assert "completions_00002.parquet: the file cannot be read" in report.quotes[0]


def test_recognition_names_what_is_ambiguous_or_unknown(tmp_path):
    both = {"input": "", "output": "", "score": 1.0, "step": 0, "prompt": "", "response": "", "reward": 1.0}
    lines(tmp_path / "both.jsonl", both)
    with pytest.raises(UserError, match=r"can be rl-logging-board or verl: choose one with --format"):
        import_run(tmp_path / "both.jsonl", tmp_path / "run")
    assert import_run(tmp_path / "both.jsonl", tmp_path / "run", "verl").format == "verl"
    lines(tmp_path / "other.jsonl", {"a": 1, "b": 2})
    with pytest.raises(UserError, match=r"not in a known format: it has the columns a, b\n"):
        import_run(tmp_path / "other.jsonl", tmp_path / "no")
    with pytest.raises(UserError, match="nowhere does not exist"):
        import_run(tmp_path / "nowhere", tmp_path / "no")
    with pytest.raises(UserError, match="there is no format 'x'; formats are rl-logging-board"):
        import_run(tmp_path / "both.jsonl", tmp_path / "no", "x")
    with pytest.raises(UserError, match="--map nothing=…: the record has no such column"):
        import_run(tmp_path / "both.jsonl", tmp_path / "no", columns={"nothing": "a"})


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("a/b/1.jsonl", '{"x": 1, "y": 2}\n', "(1 .jsonl file): a/b/1.jsonl has the columns x, y\n"),
        ("a/b/1.jsonl", "[1]\n", "(1 .jsonl file): 1.jsonl does not begin with a JSON object on one line"),
        (
            "a/log.json",
            "{}",
            "has no .jsonl, .parquet or .table.json files: it holds 1 .json file\nwrite a/log.json as JSON",
        ),
        ("log.tar.gz", "", "it holds 1 .gz file\nunpack log.tar.gz"),
        ("rollout_1.pkl", "", "it holds 1 .pkl file\nrollout_1.pkl can execute code when it is read"),
        ("rollout_1.pt", "", "rollout_1.pt cannot be read: File is not a zip file; write its rollouts as JSON Lines"),
        ("readme.txt", "", "has no .jsonl, .parquet or .table.json files: it holds 1 .txt file"),
    ],
)
def test_what_a_folder_without_rollouts_holds_is_said(file: str, content: str, said: str, tmp_path: Path) -> None:
    source = tmp_path / "logs"
    (source / file).parent.mkdir(parents=True)
    (source / file).write_text(content)
    with pytest.raises(UserError, match=re.escape(said)):
        import_run(source, tmp_path / "run")


def test_recognition_looks_past_broken_lines(tmp_path):
    good = {"prompt": "", "response": "", "reward": 1.0, "step": 0}
    (tmp_path / "a.jsonl").write_text("half a line\n[1]\n" + json.dumps(good) + "\n")
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("rl-logging-board", 1, 2)


def test_every_format_is_described():
    assert list(FORMATS) == [
        "rl-logging-board", "trl", "verl", "openrlhf", "nemo-rl", "prime-rl", "skyrl", "areal", "art", "slime",
        "inspect", "trackio", "openenv", "open-instruct", "plain",
    ]  # fmt: skip
    text = (Path(__file__).parents[2] / "docs" / "import.md").read_text(encoding="utf-8")
    for name in FORMATS:
        assert f"`{name}`" in text


OWN = {"step": 1, "prompt": "p", "response": "r", "reward": 0.5}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({}, "rl-logging-board"),
        ({"token_id": [1, 2], "logprob": [-1.0, -2.0]}, "plain"),
        ({"value": [0.5, 0.5], "advantage": 0.25}, "plain"),
        ({"split": "eval", "reward_parts": {"a": 0.5}}, "plain"),
        ({"value": 0.5, "advantage": 0.25}, "rl-logging-board"),  # no tokens
        ({"response_tokens": ["a", "b"], "token_id": [1, 2], "group": 3}, "rl-logging-board"),
    ],
)
def test_columns_called_as_in_the_record_are_plain(tmp_path, kind, columns, name):
    """Their tokens would be text in ``extra`` otherwise."""
    path = tmp_path / f"in.{kind}"
    record = OWN | columns
    if kind == "jsonl":
        lines(path, record)
    else:
        pq.write_table(pa.Table.from_pylist([record]), path)
    assert import_run(path, tmp_path / "run").format == name
    run = cavesson.open(tmp_path / "run")
    tokens = run.arrow("tokens").to_pydict()
    for column in columns.keys() & {"token_id", "logprob", "value"} if name == "plain" else ():
        assert tokens[column] == columns[column]
    for column in columns.keys() & {"split", "reward_parts"}:
        assert rows(tmp_path / "run", column) == [(columns[column],)]


@pytest.mark.parametrize("content", [b"", b"\n\n", b'[{"step": 1},\n {"step": 2}]', "{}".encode("utf-16")])
def test_a_file_without_any_record_is_said(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.jsonl does not begin with a JSON object on one line"):
        import_run(tmp_path, tmp_path / "run")


def test_maps_and_columns_with_a_name_twice_lose_nothing(tmp_path, recwarn):
    pairs = pa.array([[("a", 1.0)], [("a", 1.0), ("a", 2.0)]], pa.map_(pa.string(), pa.float64()))
    table = pa.table({"prompt": ["p", "p"], "response": ["r", "r"], "reward": [1.0, 2.0], "more": pairs})
    pq.write_table(table, tmp_path / "a.parquet")
    assert import_run(tmp_path / "a.parquet", tmp_path / "run").rollouts == 2
    kept = [json.loads(text) for (text,) in rows(tmp_path / "run", "extra")]
    assert kept[1] == {"more": [["a", 1.0], ["a", 2.0]]} and not recwarn.list
    columns = [*table.columns[:3], table["reward"]]
    twice = pa.Table.from_arrays(columns, names=["prompt", "response", "reward", "reward"])
    pq.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(UserError, match="two columns are called 'reward'"):
        import_run(tmp_path / "b.parquet", tmp_path / "other", "plain")


@pytest.mark.parametrize("depth", [400, 600, 1100, 100_000])
def test_deep_nesting_is_a_rejected_line_where_it_cannot_be_read(tmp_path, depth):
    good = {"prompt": "p", "response": "r", "reward": 0.5, "step": 0}
    deep = json.dumps(good)[:-1] + ', "more": ' + '{"a": ' * depth + '"x"' + "}" * (depth + 1)
    (tmp_path / "in.jsonl").write_text(f"{deep}\n{json.dumps(good)}\n")
    report = import_run(tmp_path / "in.jsonl", tmp_path / "run")
    assert report.rollouts + report.rejected == 2 and report.rollouts == (2 if depth < 500 else 1)


def test_a_rollout_without_a_mask_is_trained_on_whole(tmp_path):
    record = {"prompt": "p", "response": "r", "reward": 1.0, "step": 0, "logprob": [-1.0, -1.0]}
    masked = record | {"mask": [True, False]}
    lines(tmp_path / "a.jsonl", masked, record)
    lines(tmp_path / "b.jsonl", record)
    for name, lengths in (("a", [1, 2]), ("b", [2])):
        import_run(tmp_path / f"{name}.jsonl", tmp_path / f"run-{name}")
        assert [length for (length,) in rows(tmp_path / f"run-{name}", "length")] == lengths


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_source_without_records_is_refused(tmp_path, content):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl").write_text(content)
    with pytest.raises(UserError, match="in: no records were found"):
        import_run(tmp_path / "in", tmp_path / "run", format="verl")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_table_is_written_in_portions_of_what_its_rows_take(tmp_path):
    """600 rows of 4,000 numbers are 19 MB, of which 16 are held at a time."""
    ids = pa.array([list(range(4000))] * 600, pa.list_(pa.int32()))
    columns = {"prompt": ["p"] * 600, "response": ["r"] * 600, "reward": [1.0] * 600, "step": [0] * 600}
    pq.write_table(pa.table(columns | {"token_id": ids}), tmp_path / "all.parquet")
    assert import_run(tmp_path / "all.parquet", tmp_path / "run").rollouts == 600
    run = cavesson.open(tmp_path / "run")
    assert len(run.segments()) == 2
    assert [row["sample"] for row in run.rows(["sample"]).to_pylist()] == list(range(600))
