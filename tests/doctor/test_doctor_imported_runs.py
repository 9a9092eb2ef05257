"""Healthy runs as other trainers log them, with the columns that they write and no others: no error is found."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from doctor_helpers import Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.report.summary import summary
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import language
from cavesson.importers import import_run

STEPS = 24
ENGLISH = language("en")
TOKENS = ("token_id", "logprob", "ref_logprob", "sampler_logprob", "entropy", "value", "token_reward", "advantage")
Row = dict[str, Any]


def rollouts(made: Made) -> Iterator[tuple[int, list[Row]]]:
    """Yield the rollouts of each step, counted from 1; of the tokens, those that are learned from."""
    for step in range(len(made.mask)):
        rows = []
        for row in range(made.mask.shape[1]):
            inside = made.mask[step, row]
            values = {name: column[step, row] for name, column in made.rows.items()}
            values |= {name: made.tokens[name][step, row][inside].tolist() for name in TOKENS}
            rows.append(values | {"reward": float(values["reward"]), "group": int(values["group"])})
        yield step + 1, rows


def write(path: Path, records: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def turn(role: str, text: str) -> Row:
    return {"role": role, "content": text}


def advantage(row: Row) -> float:
    return float(row["advantage"][0])


def verl(folder: Path, step: int, rows: list[Row]) -> None:
    write(folder / f"{step}.jsonl", [
        {"input": row["prompt"], "output": row["response"], "gts": "x", "score": row["reward"], "step": step}
        for row in rows
    ])  # fmt: skip


def openrlhf(folder: Path, step: int, rows: list[Row]) -> None:
    """One line per sample of batch inference, without a step."""
    write(folder / "in.jsonl", [
        {"input": row["prompt"], "output": row["response"], "reward": row["reward"]} for row in rows
    ])  # fmt: skip


def openrlhf_samples(folder: Path, step: int, rows: list[Row]) -> None:
    """W&B's table of samples: one of each step, and those of the steps before."""
    place = folder / "files" / "media" / "table" / "train"
    place.mkdir(parents=True, exist_ok=True)
    before = [json.loads(path.read_text())["data"] for path in place.glob(f"generated_samples_{step - 1}_*")]
    data = [*(before[0] if before else []), [step, rows[0]["prompt"] + rows[0]["response"], rows[0]["reward"]]]
    table = {"columns": ["global_step", "text", "reward"], "data": data, "ncols": 3, "nrows": len(data)}
    (place / f"generated_samples_{step}_ab12.table.json").write_text(json.dumps(table))


def trl(folder: Path, step: int, rows: list[Row]) -> None:
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * len(rows), "prompt": [row["prompt"] for row in rows],
        "completion": [row["response"] for row in rows], "words": [row["reward"] for row in rows],
        "advantage": [advantage(row) for row in rows],
    }  # fmt: skip
    pq.write_table(pa.table(table), folder / "completions" / f"completions_{step:05d}.parquet")


def ms_swift(folder: Path, step: int, rows: list[Row]) -> None:
    write(folder / "completions.jsonl", [{
        "step": [str(step)] * len(rows), "prompt": [row["prompt"] for row in rows],
        "completion": [row["response"] for row in rows], "Words": [row["reward"] for row in rows],
        "advantages": [advantage(row) for row in rows],
    }])  # fmt: skip


def nemo_rl(folder: Path, step: int, rows: list[Row]) -> None:
    """A line per step; padding behind the responses."""
    prompt = [3, 4]
    longest = max(len(row["token_id"]) for row in rows)

    def padded(row: Row, name: str, of_prompt: list[Any]) -> list[Any]:
        return [*of_prompt, *row[name], *[0.0] * (longest - len(row[name]))]

    write(folder / f"train_data_step{step}.jsonl", [
        {
            "content": [row["prompt"], row["response"]],
            "rewards": row["reward"],
            "input_lengths": len(prompt) + len(row["token_id"]),
            "token_ids": [int(one) for one in padded(row, "token_id", prompt)],
            "token_loss_mask": [int(2 <= i < 2 + len(row["token_id"])) for i in range(longest + 2)],
            "sample_loss_mask": 1.0,
            "advantages": padded(row, "advantage", [0.0, 0.0]),
            "generation_logprobs": padded(row, "sampler_logprob", [0.0, 0.0]),
            "prev_logprobs": padded(row, "logprob", [0.0, 0.0]),
            "idx": number,
        }
        for number, row in enumerate(rows)
    ])  # fmt: skip


def prime_rl(folder: Path, step: int, rows: list[Row]) -> None:
    write(folder / "rollouts" / f"step_{step}" / "train_rollouts.jsonl", [
        {
            "example_id": row["group"], "task": "words", "prompt": [turn("user", row["prompt"])],
            "completion": [turn("assistant", row["response"])], "answer": "x", "reward": row["reward"],
            "metrics": {"words": row["reward"]}, "is_truncated": row["finish_reason"] == "length",
            "advantage": advantage(row),
            "trajectory": [{
                "tokens": {
                    "prompt_ids": [3, 4], "completion_ids": [int(one) for one in row["token_id"]],
                    "completion_mask": [1] * len(row["token_id"]), "completion_logprobs": row["sampler_logprob"],
                },
                "reward": row["reward"],
            }],
        }
        for row in rows
    ])  # fmt: skip


def skyrl(folder: Path, step: int, rows: list[Row]) -> None:
    """Evaluations only."""
    reasons = {"eos": "stop", "length": "length"}
    write(folder / "dumped_evals" / f"global_step_{step}_evals" / "words.jsonl", [
        {
            "input_prompt": row["prompt"], "output_response": row["response"], "score": [0.0, row["reward"]],
            "stop_reason": reasons[row["finish_reason"]], "env_extras": {"reward_spec": {"ground_truth": "x"}},
            "data_source": "words",
        }
        for row in rows
    ])  # fmt: skip


def areal(folder: Path, step: int, rows: list[Row]) -> None:
    for row in rows:
        line = {"task_id": row["group"], "prompt": row["prompt"], "completion": row["response"]}
        line |= {"reward": row["reward"], "head_version": step, "tail_version": step}
        write(folder / "rollout" / str(step) / f"{row['group']}.jsonl", [line])


def open_instruct(folder: Path, step: int, rows: list[Row]) -> None:
    reasons = {"eos": "stop", "length": "length"}
    write(folder / "run_rollouts_000000.jsonl", [
        {
            "step": step, "sample_idx": number, "prompt_idx": row["group"], "prompt_tokens": [3, 4],
            "response_tokens": [int(one) for one in row["token_id"]], "reward": row["reward"],
            "advantage": advantage(row), "finish_reason": reasons[row["finish_reason"]], "dataset": "words",
            "logprobs": row["sampler_logprob"],
        }
        for number, row in enumerate(rows)
    ])  # fmt: skip


def rl_logging_board(folder: Path, step: int, rows: list[Row]) -> None:
    write(folder / "data.jsonl", [
        {
            "prompt": row["prompt"], "response": row["response"], "reward": row["reward"], "step": step,
            "response_tokens": [str(one) for one in row["token_id"]], "logprobs": row["logprob"],
            "ref_logprobs": row["ref_logprob"], "values": row["value"], "token_rewards": row["token_reward"],
        }
        for row in rows
    ])  # fmt: skip


WRITERS: dict[str, Callable[[Path, int, list[Row]], None]] = {
    "verl": verl, "openrlhf": openrlhf, "openrlhf-samples": openrlhf_samples, "trl": trl, "ms-swift": ms_swift,
    "nemo-rl": nemo_rl, "prime-rl": prime_rl, "skyrl": skyrl, "areal": areal, "open-instruct": open_instruct,
    "rl-logging-board": rl_logging_board,
}  # fmt: skip


def group_advantages(made: Made) -> None:
    """Give every token of a response its reward minus the mean of its group, as trainers without a critic do."""
    reward = made.rows["reward"].reshape(len(made.mask), -1, 4)
    relative = ((reward - reward.mean(-1, keepdims=True)) / (reward.std(-1, keepdims=True) + 1e-6)).reshape(
        len(made.mask), -1
    )
    made.tokens["advantage"] = np.where(made.mask, relative[..., None], 0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("steps", [2, STEPS])
@pytest.mark.parametrize("kind", WRITERS)
def test_a_healthy_log_has_no_error_and_what_it_lacks_is_said(kind: str, steps: int, tmp_path: Path) -> None:
    made = healthy("ppo" if kind == "rl-logging-board" else "grpo", steps=steps)
    if kind != "rl-logging-board":
        group_advantages(made)
    for step, rows in rollouts(made):
        WRITERS[kind](tmp_path / "theirs", step, rows)
    report = import_run(tmp_path / "theirs", tmp_path / "run")
    assert report.rejected == 0, report.quotes
    data = RunData(cavesson.open(tmp_path / "run"))
    found = diagnose(data, RULES)
    assert [one.rule.name for one in found.findings] == []
    assert summary(found, ENGLISH).startswith("Not judged: ") and not_excluded(found)
