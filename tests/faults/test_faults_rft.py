"""RFT-FaultBench, on made-up files of its layout: labels, scores worked by hand, and what is said of another layout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
import cavesson
from benchmarks.faults.rft import (
    NORMAL,
    RUNS,
    STEPS,
    TRAJECTORIES,
    Judged,
    average,
    by_family,
    folders_in,
    judged,
    record,
    report,
    scored,
)
from cavesson.errors import UserError

ROOT = Path(__file__).parents[2]


def trajectory(step: int | None, reward: float | None, length: int | None, fault: Any = None) -> dict[str, Any]:
    metrics = {"reward": reward, "response_length": length, "advantage_mean": 0.0, "repetition_ratio": 0.1}
    metadata = {"rollout_step": step} | ({} if fault is None else {"fault_injection": fault})
    return {"metrics": metrics, "metadata": metadata, "flags": {"empty_response": False}}


def write_run(folder: Path, length: float = 100.0, fault: Any = None, steps: int = 20, seed: int = 0) -> Path:
    """A run of OpenRLHF as the benchmark has it; its responses shrink or grow from 100 tokens to ``length``."""
    logs = folder / "logs"
    logs.mkdir(parents=True)
    chance = np.random.default_rng(seed)
    with (logs / STEPS).open("w") as file:
        for step in range(steps):
            file.write(json.dumps({"metrics": {"kl": 0.01 * step, "loss": 0.5, "note": None}}) + "\n")
    with (logs / TRAJECTORIES).open("w") as file:
        for step in range(steps):
            typical = 100 + (length - 100) * min(1, 2 * step / steps)
            for _ in range(16):
                drawn = max(1, round(float(chance.normal(typical, 0.1 * typical))))
                file.write(json.dumps(trajectory(step + 1, float(chance.normal(0.01 * step, 1)), drawn, fault)) + "\n")
    return logs


FAULT = {"fault_injection_type": "short_bias", "fault_injection_strength": 0.5}


def benchmark(root: Path) -> Path:
    """A baseline, and of one family an injected run that shows its fault, one that does not, and a control."""
    write_run(root / "baselines" / "base", seed=1)
    write_run(root / "rf_01_hard_fault" / "seen", 5.0, FAULT, seed=2)
    write_run(root / "rf_01_hard_fault" / "hidden", 100.0, FAULT, seed=3)
    write_run(root / "rf_01_hard_fault" / "control", seed=4)
    write_run(root / "te_02_easy_fault" / "easy", 5.0, FAULT, seed=5)
    (root / "metadata").mkdir()
    return root


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (None, None),
        ({}, None),
        ({"fault_injection_type": "x"}, None),
        ({"fault_injection_type": "x", "fault_injection_strength": 0.0}, None),
        ({"fault_injection_type": "x", "fault_injection_strength": "0"}, None),
        ({"fault_injection_type": None, "fault_injection_strength": 1}, None),
        ({"fault_injection_type": "x", "fault_injection_strength": 0.5}, "x"),
    ],
)
def test_a_run_is_faulty_if_a_fault_was_injected_into_a_response(given, kind, tmp_path):
    assert record(write_run(tmp_path / "g" / "r", fault=given, steps=5), tmp_path / "run") == kind


def test_what_is_recorded(tmp_path):
    logs = write_run(tmp_path / "g" / "r", steps=3)
    with (logs / TRAJECTORIES).open("a") as file:
        file.write(json.dumps(trajectory(None, 9.0, 9)) + "\n" + json.dumps(trajectory(3, None, None)) + "\n\n")
    record(logs, tmp_path / "run")
    run = cavesson.open(tmp_path / "run")
    rows = run.rows(["step", "sample", "prompt", "response", "reward", "length"]).to_pylist()
    assert [(row["step"], row["sample"]) for row in rows] == [(s, i) for s in (1, 2, 3) for i in range(16 + (s == 3))]
    first = json.loads((logs / TRAJECTORIES).read_text().splitlines()[0])["metrics"]
    assert rows[0] == {"step": 1, "sample": 0, "prompt": None, "response": None} | {
        "reward": first["reward"], "length": first["response_length"]
    }  # fmt: skip
    assert rows[-1]["reward"] is None and rows[-1]["length"] is None
    assert run.steps().to_pylist() == [{"step": s, "attempt": 0, "kl": 0.01 * (s - 1), "loss": 0.5} for s in (1, 2, 3)]


def test_the_doctor_looks_at_every_run_and_the_score_is_that_by_hand(tmp_path):
    runs = [judged(logs) for logs in folders_in(benchmark(tmp_path / "bench"))]
    assert [(run.family, run.setting) for run in runs] == [(None, None), *3 * [("rf", "hard")], ("te", "easy")]
    assert [run.fault for run in runs] == [None, None, "short_bias", "short_bias", "short_bias"]
    assert "length-collapse" in next(run.named for run in runs if run.family == "te")
    # Hard: the run that shrinks is flagged, the hidden one is not, and neither are control and baseline.
    (hard,) = by_family(runs, "hard").values()
    assert hard == (100.0, 50.0, pytest.approx(200 / 3))
    # All four flagged: two of them are faulty.
    assert by_family(runs, "hard", flag_all=True)["rf"] == (50.0, 100.0, pytest.approx(200 / 3))
    assert average(by_family(runs, "easy")) == 100.0
    text = report(runs)
    assert "5 runs, 2 of them normal" in text and "false alarms: 0 of 2" in text
    assert "not flagged: short_bias 1" in text


def test_flagging_everything_scores_what_was_published():
    """16 kinds of faults: 3 in each family but ca, which has 4; 20 easy runs each, and 14 injected and 14 controls."""
    runs = [Judged("baseline", None, ()) for _ in range(11)]
    for family, kinds in {"rf": 3, "pg": 3, "od": 3, "ca": 4, "te": 3}.items():
        for kind in range(kinds):
            runs += [Judged(f"{family}{kind}_easy_fault", "x", ())] * 20
            runs += [Judged(f"{family}{kind}_hard_fault", "x", ())] * 14
            runs += [Judged(f"{family}{kind}_hard_fault", None, ())] * 14
    assert (len(runs), sum(run.fault is None for run in runs)) == (RUNS, NORMAL)
    assert average(by_family(runs, "hard", flag_all=True)) == pytest.approx(61.57, abs=0.005)
    assert average(by_family(runs, "easy", flag_all=True)) == pytest.approx(92.00, abs=0.005)


def test_a_share_of_nothing_is_zero():
    assert scored([True, False], [False, False]) == (0.0, 0.0, 0.0)
    assert scored([False], [True]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        (TRAJECTORIES, {"metadata": {"rollout_step": 1}}, "line 1: expected an object with 'metrics', found"),
        (
            TRAJECTORIES,
            {"metrics": {"reward": 1}, "step": 1},
            "metadata.rollout_step, found ['metrics', 'step']",
        ),
        (TRAJECTORIES, trajectory(1, 0.5, None), "expected numbers in metrics.response_length, found none in 1 resp"),
        (
            TRAJECTORIES,
            {"metrics": {}, "metadata": {"rollout_step": 1}},
            "numbers in metrics.reward, found none",
        ),
        (STEPS, {"loss": 0.5}, "openrlhf_train_train_step.jsonl, line 1: expected an object with 'metrics'"),
    ],
)
def test_another_layout_is_named_in_one_line(tmp_path, name, line, message):
    logs = write_run(tmp_path / "g" / "r", steps=2)
    (logs / name).write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError) as found:
        record(logs, tmp_path / "run")
    assert message in str(found.value) and "\n" not in str(found.value)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "benchmarks.faults.rft", "--processes", "1"]
    empty = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert empty.returncode == 1
    assert empty.stderr == f"{tmp_path}: expected GROUP/RUN/LOGS/{STEPS}, found nothing\n"
    logs = write_run(tmp_path / "baselines" / "r", steps=4)
    (logs / TRAJECTORIES).rename(logs / "other.jsonl")
    lacking = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert lacking.stderr == f"{logs}: expected {TRAJECTORIES} beside {STEPS}, found {STEPS}, other.jsonl\n"
    (logs / "other.jsonl").rename(logs / TRAJECTORIES)
    done = subprocess.run([*command, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("1 runs, 1 of them normal"), done.stderr
