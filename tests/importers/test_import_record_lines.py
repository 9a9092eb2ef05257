"""The lines that the doctor gives for NeMo RL and prime-rl run, and record the columns that they name."""

import shlex
from pathlib import Path

import pytest
import torch
from import_helpers import lines
from test_import_formats import nemo_line
from test_import_prime_rl import prime_episode, prime_stream
from typer.testing import CliRunner

import cavesson
from benchmarks.sufficient import COMPUTED
from cavesson.cli import app
from cavesson.doctor.data import RunData
from cavesson.doctor.recording import WAYS, Way

IMPORT, LINE, PRIME = (way for way in WAYS if way.name in ("nemo-rl", "prime-rl"))


def run_command(way: Way) -> None:
    program, *arguments = shlex.split(way.code, comments=True)
    assert program == "cavesson"
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def lacking(way: Way, run: Path) -> set[str]:
    """Return the columns that the way names and the record lacks; short responses repeat nothing."""
    data = RunData(cavesson.open(run))
    return {column for column in way.records if not data.recorded(column)} - {"rows.repetition"}


@pytest.mark.parametrize("added", [False, True])
def test_nemo_rl(added, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log_data = nemo_line()
    if added:
        reference = torch.tensor(log_data["prev_logprobs"]) - 0.5
        exec(LINE.code, {"log_data": log_data, "train_data": {"reference_policy_logprobs": reference}})
    lines(tmp_path / "logs" / "exp_001" / "train_data_step1.jsonl", log_data, log_data)
    run_command(IMPORT)
    assert lacking(IMPORT, tmp_path / "runs" / "mine") == set()
    assert lacking(LINE, tmp_path / "runs" / "mine") == (set() if added else LINE.records)
    row, tokens = cavesson.open(tmp_path / "runs" / "mine").rollout(1, 0)
    # Of the six tokens, the first two are the prompt's, and the fifth is the environment's.
    if added:
        assert tokens["ref_logprob"].to_pylist() == [-1.75, -2.5, -0.5, -1.0]
        assert row["kl_k1"] == 3 * 0.5


def test_prime_rl(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prime_stream(tmp_path / "RUN_DIR", "chunks")
    run_command(PRIME)
    # Of these responses, not all tokens were scored, so the statistics of the whole responses are missing.
    assert {one for one in lacking(PRIME, tmp_path / "runs" / "mine") if one not in COMPUTED} == set()


def test_earlier_versions_of_prime_rl_lack_what_the_line_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "RUN_DIR" / "rollouts" / "step_7" / "train" / "all" / "traces.jsonl", prime_episode())
    run_command(PRIME)
    missing = {column for column in lacking(PRIME, tmp_path / "runs" / "mine") if column.startswith("tokens.")}
    assert missing == {one for one, text in PRIME.requires.items() if "2026" in text}
