"""Where trainers put their files: every row is read once, with the step that a column or a name gives it."""

import gzip
import json
import os
import tempfile
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_helpers import lines, rows

import cavesson
from cavesson.errors import UserError
from cavesson.importers import follow_run, import_run
from cavesson.importers.rollout import Names
from cavesson.importers.steps import step_in_names


def steps(run: Path) -> dict[int, int]:
    """The number of rollouts of each step."""
    found = [step for (step,) in rows(run, "step")]
    return {step: found.count(step) for step in sorted(set(found))}


def prime_rollout(reward: float, text: str, **more: Any) -> dict[str, Any]:
    """As prime-rl wrote them in spring 2026: two turns, with a token of the environment between them."""
    tokens = [
        {
            "prompt_ids": [5, 6],
            "completion_ids": [8, 9],
            "completion_mask": [1, 1],
            "completion_logprobs": [-0.5, -0.25],
        },
        {"prompt_ids": [5, 6, 8, 9, 7], "completion_ids": [4], "completion_mask": [1], "completion_logprobs": [-1.0]},
    ]
    return {
        "example_id": 3, "task": "sums", "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": text}], "answer": "4", "reward": reward,
        "metrics": {"correct": bool(reward), "length": 7}, "is_truncated": False, "advantage": 0.5,
        "trajectory": [{"tokens": one, "reward": reward} for one in tokens],
    } | more  # fmt: skip


def test_prime_rl_of_spring_2026(tmp_path):
    for step in (1, 2):
        folder = tmp_path / "out" / "rollouts" / f"step_{step}"
        lines(folder / "train_rollouts.jsonl", prime_rollout(1.0, "4"), prime_rollout(0.0, "5"))
        (folder / "rank_0.bin").write_bytes(b"")
    lines(tmp_path / "out" / "rollouts" / "step_2" / "eval_rollouts.jsonl", prime_rollout(1.0, "4", trajectory=None))
    lines(tmp_path / "out" / "metrics.jsonl", {"step": 1, "loss": 0.5})
    report = import_run(tmp_path / "out", tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("prime-rl", 5, 0)
    assert "1 file not read: metrics.jsonl" in report.notes
    assert steps(tmp_path / "run") == {1: 2, 2: 3}
    assert sorted(rows(tmp_path / "run", "split")) == [("eval",), *[("train",)] * 4]
    row, tokens = cavesson.open(tmp_path / "run").rollout(1, 0)
    assert (row["prompt"], row["response"], row["ground_truth"]) == ("[user]\n2+2?", "[assistant]\n4", "4")
    assert dict(row["reward_parts"]) == {"correct": 1.0, "length": 7.0} and row["prompt_ids"] == [5, 6]
    assert tokens["token_id"].to_pylist() == [8, 9, 7, 4]
    assert tokens["learned"].to_pylist() == [True, True, False, True]
    assert tokens["sampler_logprob"].to_pylist() == [-0.5, -0.25, None, -1.0]
    # With the names of the columns, the steps are the same.
    import_run(tmp_path / "out", tmp_path / "mapped", columns={"response": "completion"})
    assert steps(tmp_path / "mapped") == {1: 2, 2: 3}


def test_turns_that_do_not_continue_each_other_keep_their_ids_in_extra(tmp_path):
    record = prime_rollout(1.0, "4")
    record["trajectory"][1]["tokens"]["prompt_ids"] = [5, 7]
    lines(tmp_path / "step_3" / "train_rollouts.jsonl", record)
    import_run(tmp_path, tmp_path / "run")
    ((extra,),) = rows(tmp_path / "run", "extra")
    assert json.loads(extra)["trajectory"] == record["trajectory"]
    assert cavesson.open(tmp_path / "run").tokens(3).num_rows == 0


def test_skyrl(tmp_path):
    line = {"input_prompt": "q", "output_response": "4", "score": [0.0, 0.0, 1.0], "stop_reason": "stop"}
    line |= {"env_extras": {"reward_spec": {"ground_truth": "4"}}, "data_source": "gsm8k"}
    for step in (0, 10):
        folder = tmp_path / "dumped_evals" / f"global_step_{step}_evals"
        lines(folder / "gsm8k.jsonl", line, line | {"score": 0.5})
        lines(folder / "aggregated_results.jsonl", {"eval/all/avg_score": 1.0})
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts, report.rejected) == ("skyrl", 4, 0)
    found = rows(tmp_path / "run", "step", "reward", "split", "ground_truth", "finish_reason")
    assert found == [(step, reward, "eval", "4", "stop") for step in (0, 10) for reward in (1.0, 0.5)]
    assert json.loads(rows(tmp_path / "run", "extra")[0][0])["score"] == [0.0, 0.0, 1.0]


def test_areal(tmp_path):
    line = {"task_id": 17, "prompt": "p", "completion": "r", "reward": 1.0, "head_version": 2, "tail_version": 3}
    for folder in ("rollout", "eval-rollout"):
        lines(tmp_path / folder / "3" / "17.jsonl", line)
    report = import_run(tmp_path, tmp_path / "run")
    assert (report.format, report.rollouts) == ("areal", 2)
    assert rows(tmp_path / "run", "step", "policy_version", "split") == [(3, 2, "eval"), (3, 2, "train")]


def test_ms_swift_writes_columns_in_a_line(tmp_path):
    line = {
        "step": ["5", "5"], "prompt": ["q", "q"], "completion": ["a", "b"], "accuracy": [1.0, 0.0],
        "format": [0.5, 0.5], "advantages": [0.5, -0.5], "solution": ["a", "a"], "num_turns": [1, 2],
    }  # fmt: skip
    lines(tmp_path / "completions.jsonl", line)
    assert import_run(tmp_path, tmp_path / "run").format == "trl"
    found = rows(tmp_path / "run", "step", "response", "reward", "reward_parts")
    # What comes after the advantages is not a reward.
    assert found == [
        (5, "a", 1.5, {"accuracy": 1.0, "format": 0.5, "num_turns": 1.0}),
        (5, "b", 0.5, {"accuracy": 0.0, "format": 0.5, "num_turns": 2.0}),
    ]
    assert json.loads(rows(tmp_path / "run", "extra")[1][0]) == {"advantages": -0.5, "solution": "a"}


def wandb_table(path: Path, step: int, count: int = 1, columns: tuple[str, ...] = ("maths", "advantage")) -> None:
    data = [[str(step), "q", f"{step} {i}", 1.0, 0.5] for i in range(count)]
    table = {"columns": ["step", "prompt", "completion", *columns], "data": data, "ncols": 5, "nrows": count}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))


def test_tables_of_trl_in_a_folder_of_weights_and_biases(tmp_path):
    first, second = tmp_path / "wandb" / "run-1", tmp_path / "wandb" / "offline-run-2"
    for step in (5, 10):
        wandb_table(first / "files" / "media" / "table" / f"completions_{step}_ab12cd.table.json", step, count=step)
    (first / "files" / "wandb-summary.json").write_text("{}")
    for source in (tmp_path / "wandb", first):
        report = import_run(source, tmp_path / f"run {source.name}")
        assert (report.format, report.files, report.rejected) == ("trl", 2, 0)
        assert steps(tmp_path / f"run {source.name}") == {5: 5, 10: 10}
    wandb_table(second / "files" / "media" / "table" / "completions_15_ffff.table.json", 15)
    with pytest.raises(UserError, match=r"of 2 runs.*import one of them: offline-run-2, run-1"):
        import_run(tmp_path / "wandb", tmp_path / "no")


def test_tables_of_trl_can_be_followed(tmp_path):
    tables = tmp_path / "in" / "files" / "media" / "table"
    wandb_table(tables / "completions_1_a.table.json", 1)

    def more(rollouts: int, rejected: int) -> None:
        wandb_table(tables / "completions_2_b.table.json", 2, count=3)

    report = follow_run(tmp_path / "in", tmp_path / "run", until_idle=1, progress=more)
    assert (report.rollouts, steps(tmp_path / "run")) == (4, {1: 1, 2: 3})


def test_a_table_that_repeats_the_earlier_ones_is_read_once(tmp_path):
    for step in (1, 2, 3):
        data = [[i, f"p{i}", f"r{i}", 0.5 * i] for i in range(1, step + 1)]
        path = tmp_path / "files" / "media" / "table" / f"samples_{step}_a{step}.table.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"columns": ["step", "prompt", "response", "reward"], "data": data}))
    report = import_run(tmp_path, tmp_path / "run", "plain")
    assert (report.files, steps(tmp_path / "run")) == (1, {1: 1, 2: 1, 3: 1})
    assert report.notes == [
        "2 files not read: files/media/table/samples_1_a1.table.json, files/media/table/samples_2_a2.table.json"
    ]


@pytest.mark.parametrize(
    ("name", "record", "files"),
    [
        ("verl", {"input": "p", "output": "r", "score": 1.0}, ("rollout/1.jsonl", "validation/1.jsonl")),
        (
            "nemo-rl",
            {"content": "p", "rewards": 1.0, "idx": 0},
            ("a/train_data_step1.jsonl", "b/train_data_step1.jsonl"),
        ),
        ("prime-rl", prime_rollout(1.0, "4"), ("a/step_1/train_rollouts.jsonl", "b/step_1/train_rollouts.jsonl")),
    ],
)
def test_two_runs_are_not_one(tmp_path, name, record, files):
    for file in files:
        lines(tmp_path / "in" / file, record)
    both = ", ".join(file.partition("/")[0] for file in files)
    with pytest.raises(UserError, match=f"of 2 runs, or of training and validation.*import one of them: {both}"):
        import_run(tmp_path / "in", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    one = tmp_path / "in" / files[0].partition("/")[0]
    assert import_run(one, tmp_path / "one").format == name
    assert steps(tmp_path / "one") == {1: 1}


PLAIN = {"prompt": "p", "response": "r", "reward": 1.0}


@pytest.mark.parametrize(
    ("inside", "outside", "step"),
    [
        ("step_5/rank_3.jsonl", "", 5), ("a/global_step_12_evals/gsm8k.jsonl", "", 12), ("5.jsonl", "", 5),
        ("iteration-3/out.jsonl", "", 3), ("7/out.parquet", "", 7), ("step=04/part-0.parquet", "", 4),
        ("epoch_2/step_9/a.jsonl", "", 9), ("checkpoint-500/9.jsonl", "", 500), ("2/5.jsonl.gz", "", 5),
        ("train_data_step3.jsonl", "", 3), ("a.jsonl", "step_8", 8), ("3.jsonl", "two_steps_2", 3),
        ("rank_3.jsonl", "", None), ("worker0/part-00012-of-00020.parquet", "", None), ("a.jsonl", "2026", None),
        ("step_99999999999/a.jsonl", "", None), ("footprint_3.jsonl", "", None),
    ],
)  # fmt: skip
def test_the_step_in_a_name(inside, outside, step):
    assert step_in_names(Names(inside, outside)) == step


NAMES = ("step_{}", "global_step_{}", "step-{:06d}", "iter_{}", "{}")


@settings(max_examples=min(30, settings.default.max_examples))
@given(st.data())
def test_every_row_is_read_once_with_its_step_and_all_its_columns(data):
    """Files of one table, in folders that name their step, in the file's own name, or with a column of steps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected = {}
        place = data.draw(st.sampled_from(["folder", "file", "column"]))
        pattern = data.draw(st.sampled_from(NAMES))
        above = data.draw(st.lists(st.sampled_from(["logs", "x y", "out"]), max_size=2))
        for step in data.draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=4, unique=True)):
            where = folder.joinpath("in", *above)
            end = data.draw(st.sampled_from([".jsonl", ".jsonl.gz", ".parquet"]))
            path = (
                where / pattern.format(step) / f"a{end}"
                if place == "folder"
                else where / f"{pattern.format(step)}{end}"
            )
            found = [
                {"prompt": "p", "response": f"{step} {i}", "reward": i / 2, "more": {"a": [i]}, "acc": i % 2 == 0}
                | ({"global_step": step + 1} if place == "column" else {})
                for i in range(data.draw(st.integers(1, 3)))
            ]
            write(path, found)
            expected |= {row["response"]: (row.get("global_step", step), row["reward"], row) for row in found}
        report = import_run(folder / "in", folder / "run", columns={"reward_parts.acc": "acc"})
        assert report.rejected == 0 and report.rollouts == len(expected)
        table = rows(folder / "run", "response", "step", "reward", "reward_parts", "extra")
        assert {response: (step, reward) for response, step, reward, *_ in table} == {
            response: one[:2] for response, one in expected.items()
        }
        for response, _, _, parts, extra in table:
            source = expected[response][2]
            assert parts == {"acc": float(source["acc"])}
            rest = source.keys() - {"prompt", "response", "reward", "acc"}
            assert json.loads(extra) == {key: source[key] for key in rest}
        (note,) = report.notes
        assert ("column 'global_step'" in note) == (place == "column") and f"({len(expected)} rollout" in note


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
        return
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_what_has_no_step_is_said(tmp_path):
    for number in (1, 2):
        lines(tmp_path / "in" / f"rollouts_{number}.jsonl", PLAIN)
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert steps(tmp_path / "run") == {0: 2}
    assert any("the step is 0" in note and "(2 rollouts)" in note for note in report.notes)
    report = import_run(tmp_path / "in", tmp_path / "named", columns={"step": "rollouts_{}"})
    assert (steps(tmp_path / "named"), report.notes) == ({1: 1, 2: 1}, [])


def test_which_of_several_columns_is_the_step_is_said(tmp_path):
    lines(tmp_path / "in.jsonl", PLAIN | {"step": 1, "global_step": 7}, PLAIN | {"iteration": 3, "update": "x"})
    report = import_run(tmp_path / "in.jsonl", tmp_path / "run", "plain")
    assert steps(tmp_path / "run") == {1: 1, 3: 1}
    assert "the step is the column 'step', not 'global_step' (1 rollout)" in report.notes
    assert "the step is the column 'iteration' (1 rollout)" in report.notes


def test_folders_of_new_steps_are_followed(tmp_path):
    lines(tmp_path / "in" / "step_1" / "a.jsonl", PLAIN)

    def later(rollouts: int, rejected: int) -> None:
        if rollouts == 1:
            thread = Thread(target=lines, args=(tmp_path / "in" / "x" / "step_2" / "a.jsonl", PLAIN, PLAIN))
            thread.start()
            thread.join()

    report = follow_run(tmp_path / "in", tmp_path / "run", until_idle=1, progress=later)
    assert (report.rollouts, steps(tmp_path / "run")) == (3, {1: 1, 2: 2})


def test_the_same_steps_in_folders_of_a_table_are_said(tmp_path):
    for rank in (0, 1):
        lines(tmp_path / "in" / f"rank{rank}" / "step_1.jsonl", PLAIN)
    report = import_run(tmp_path / "in", tmp_path / "run")
    assert steps(tmp_path / "run") == {1: 2}
    assert "the same steps are in 2 folders: rank0, rank1" in report.notes


@pytest.mark.parametrize("inner", ["", "train", "train/all", "train/all/rollouts.jsonl"])
def test_a_source_inside_the_folder_of_a_step_has_its_step(tmp_path, inner):
    lines(tmp_path / "step_7" / "train" / "all" / "rollouts.jsonl", PLAIN)
    import_run(tmp_path / "step_7" / inner, tmp_path / "run")
    assert steps(tmp_path / "run") == {7: 1}


def test_what_is_not_a_file_is_not_read(tmp_path):
    lines(tmp_path / "in" / "a.jsonl", PLAIN)
    os.mkfifo(tmp_path / "in" / "b.jsonl")
    (tmp_path / "in" / "c.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "in" / "d.jsonl").mkdir()
    assert import_run(tmp_path / "in", tmp_path / "run").files == 1
