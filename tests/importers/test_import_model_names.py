"""A log with token ids and no text is read again with the tokenizer that it names; nothing is loaded by this name."""

import json
from pathlib import Path
from typing import Any

import pytest
from import_helpers import lines
from typer.testing import CliRunner

from cavesson.cli import app
from cavesson.importers import import_run

PLAIN = "and the model's folder or Hub name"
UNREADABLE = "token ids cannot be shown as text: import again with --tokenizer "


def nemo_rl(folder: Path, **others: Any) -> Path:
    """A line of NeMo RL, whose texts are known and whose tokens are not."""
    record = {
        "content": ["2+2=", "4"], "rewards": 1.0, "idx": 0, "input_lengths": 4, "token_ids": [5, 6, 7, 8],
        "token_loss_mask": [0, 0, 1, 1],
    }  # fmt: skip
    lines(folder / "train_data_step1.jsonl", {key: [value] for key, value in (record | others).items()})
    return folder


def prime_rl(folder: Path, model: str | None) -> Path:
    nodes = [
        {"message": {"role": "user", "content": "2+2="}, "token_ids": [1, 2], "mask": [False, False], "sampled": False},
        {
            "message": {"role": "assistant", "content": "4"},
            "token_ids": [3],
            "mask": [True],
            "sampled": True,
            "parent": 0,
        },
    ]
    calls = [{"finish_reason": "stop", **({} if model is None else {"model": model})}]
    trace = {"nodes": nodes, "rewards": {"correct": {"score": 1.0}}, "task": "sums", "calls": calls}
    lines(folder / "rollouts" / "step_1" / "train" / "all" / "traces.jsonl", {"traces": [trace]})
    return folder


def note(source: Path, run: Path) -> str:
    (found,) = [one for one in import_run(source, run).notes if "--tokenizer" in one]
    assert found.startswith(UNREADABLE) and found.endswith(" (1 rollout)")
    return found.removeprefix(UNREADABLE).removesuffix(" (1 rollout)")


NEMO = """
grpo:
  num_prompts_per_step: 32
policy:
  model_name: "Qwen/Qwen2.5-1.5B"  # as in the paper
  tokenizer:
    name: ${policy.model_name}
"""
WANDB = "_wandb:\n    value: {}\nmodel_name_or_path:\n    value: Qwen/Qwen3-4B\ntokenizer_name:\n    value: null\n"
ORCHESTRATOR = '[model]\nname = "Qwen/Qwen3-0.6B"\n\n[tokenizer]\nname = "Qwen/Qwen3-0.6B-Base"\n'


@pytest.mark.parametrize(
    ("file", "text", "name"),
    [
        ("config.yaml", NEMO, "Qwen/Qwen2.5-1.5B"),
        ("config.yaml", NEMO.replace("${policy.model_name}", "my/tokenizer"), "my/tokenizer"),
        ("wandb/run-1/files/config.yaml", WANDB, "Qwen/Qwen3-4B"),
        ("configs/orchestrator.toml", ORCHESTRATOR, "Qwen/Qwen3-0.6B-Base"),
        ("params.json", json.dumps({"actor": {"model": {"path": "/models/q"}}}), "/models/q"),
        ("args.json", json.dumps({"tokenizer_name": None, "model_name_or_path": "a/b"}), "a/b"),
    ],
)
def test_a_tokenizer_that_a_configuration_names_is_proposed(tmp_path, file, text, name):
    source = nemo_rl(tmp_path / "in")
    (source / file).parent.mkdir(parents=True, exist_ok=True)
    (source / file).write_text(text)
    assert note(source, tmp_path / "run") == f"{name}, which {Path(file).name} names"
    # Nothing was loaded by this name.
    assert not (tmp_path / "run" / "vocabulary.parquet").exists()


def test_a_configuration_above_the_files_is_read_too(tmp_path):
    prime_rl(tmp_path / "outputs", None)
    (tmp_path / "outputs" / "configs").mkdir()
    (tmp_path / "outputs" / "configs" / "rl.toml").write_text('[model]\nname = "a/b"\n')
    assert note(tmp_path / "outputs" / "rollouts", tmp_path / "run") == "a/b, which rl.toml names"


def test_a_name_in_the_log_itself_is_proposed(tmp_path):
    assert note(prime_rl(tmp_path / "in", "Qwen/Qwen3-0.6B"), tmp_path / "run") == (
        "Qwen/Qwen3-0.6B, which the log names"
    )


@pytest.mark.parametrize(
    "name", ["--allow-remote", "a b", "x; rm -rf y", "$(id)", "a\nb", "\x1b[31m", "", "12", "none"]
)
def test_what_is_not_a_name_is_not_proposed(tmp_path, name):
    assert note(prime_rl(tmp_path / "in", name), tmp_path / "run") == PLAIN


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.toml", b"[model"),
        ("a.json", b"["),
        ("a.json", b"[" * 100_000),
        ("metadata.jsonl", b""),
        ("a.yaml", b"\xff:\n"),
    ],
)
def test_a_broken_configuration_is_passed_over(tmp_path, file, content):
    source = nemo_rl(tmp_path / "in")
    (source / file).write_bytes(content)
    assert note(source, tmp_path / "run") == PLAIN


def test_the_command_prints_the_name(tmp_path):
    source = prime_rl(tmp_path / "in", "Qwen/Qwen3-0.6B")
    done = CliRunner().invoke(app, ["import", str(source), str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "import again with --tokenizer Qwen/Qwen3-0.6B, which the log names (1 rollout)" in done.output
