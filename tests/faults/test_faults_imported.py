"""Planted runs as other trainers would have written them: the import gives back what the formats hold, and no more."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from faults_helpers import ADVANTAGES, CASE, PROMPTS, RESPONSES, REWARDS, made

import cavesson
from benchmarks.faults.case import Case
from benchmarks.faults.imported import WRITERS, chosen, imported
from cavesson.importers import import_run
from cavesson.record import Run


def written(tmp_path: Path, name: str) -> tuple[Path, Run]:
    """Write the run in a format; return the folder, and the run that is imported from it."""
    out = tmp_path / "theirs"
    out.mkdir()
    WRITERS[name](made(tmp_path / "run"), out)
    report = import_run(out, tmp_path / "imported", name)
    assert report.rejected == 0
    return out, cavesson.open(tmp_path / "imported")


@pytest.mark.parametrize("name", ["verl", "trl"])
def test_what_was_trained_on_comes_back(name: str, tmp_path: Path) -> None:
    _, run = written(tmp_path, name)
    found = run.rows(["step", "prompt", "response", "reward_parts"]).to_pylist(maps_as_pydicts="strict")
    parts = [{"kind": 2 * reward, "short": -reward} for reward in REWARDS]
    trained = list(zip(PROMPTS, RESPONSES, parts, strict=True))
    # Steps are counted from 1; the held-out responses are not there.
    for step in (1, 2):
        came = [(row["prompt"], row["response"], row["reward_parts"]) for row in found if row["step"] == step]
        assert sorted(came, key=str) == sorted(trained, key=str)
    assert len(found) == 2 * len(trained)


def test_verl_has_the_score_and_a_file_per_step(tmp_path: Path) -> None:
    out, run = written(tmp_path, "verl")
    lines = [json.loads(line) for line in (out / "2.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines[1] == {
        "input": "a the", "output": " bad", "gts": None, "score": -0.5, "step": 2, "kind": -1.0, "short": 0.5
    }  # fmt: skip
    assert sorted(run.rows(["reward"])["reward"].to_pylist()) == sorted(REWARDS * 2)
    assert run.arrow("tokens").num_rows == 0


def test_trl_has_the_columns_of_its_table(tmp_path: Path) -> None:
    out, run = written(tmp_path, "trl")
    table = pq.read_table(out / "completions" / "completions_00001.parquet")
    assert table.column_names == ["step", "prompt", "completion", "kind", "short", "advantage"]
    assert table["advantage"].to_pylist() == ADVANTAGES
    # Without the weights of the parts the reward is their sum: twice the reward less the reward.
    assert sorted(run.rows(["reward"])["reward"].to_pylist()) == sorted(REWARDS * 2)


def test_rl_logging_board_keeps_tokens_and_log_probabilities(tmp_path: Path) -> None:
    _, run = written(tmp_path, "rl-logging-board")
    tokens = run.tokens(1, 0)
    assert tokens["token"].to_pylist() == ["good", "room"]
    assert tokens["logprob"].to_pylist() == [-0.5, -0.5]
    assert tokens["ref_logprob"].to_pylist() == [-1.0, -1.0]
    assert tokens["advantage"].null_count == 2


def test_every_format_is_looked_at_but_where_its_trainer_has_no_such_algorithm(tmp_path: Path) -> None:
    assert list(imported(made(tmp_path / "grpo"))) == ["rl-logging-board", "verl", "trl"]
    found = imported(made(tmp_path / "ppo", CASE._replace(algorithm="ppo")))
    assert list(found) == ["rl-logging-board", "verl"]
    assert found["verl"].steps == 2
    # Without log-probabilities the rule of the planted fault cannot be applied.
    assert "filtered-sampling" in found["verl"].skipped
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "case.json").write_text(json.dumps(CASE._asdict()))
    assert imported(empty) == {}


def test_one_run_per_fault_and_every_healthy_one_of_the_first_held_out_seed(tmp_path: Path) -> None:
    cases = [Case("top-p", level, "ppo", "small", seed) for level in range(3) for seed in (2, 3, 4)]
    cases += [Case("usual", -1, algorithm, "small", 3) for algorithm in ("ppo", "grpo")]
    cases += [Case("usual", -1, "ppo", "large", 3)]
    for case in cases:
        (tmp_path / case.folder).mkdir()
        (tmp_path / case.folder / "case.json").write_text(json.dumps(case._asdict()))
    names = {folder.name for folder in chosen(sorted(tmp_path.iterdir()))}
    # The second fault of the list has its second level.
    assert names == {"top-p--1--ppo--small--3", "usual---1--ppo--small--3", "usual---1--grpo--small--3"}
