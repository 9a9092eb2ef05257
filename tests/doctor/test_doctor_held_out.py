"""Records that have responses to held-out prompts only, such as the table of TRL's PPO or verl's validation."""

import json
from pathlib import Path

import numpy as np
import pytest

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import HELD_OUT, Diagnosis, diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES
from cavesson.importers import import_run
from cavesson.record import begin_attempt, write_run
from cavesson.record.write.recorder import Recorder


def diagnosed(folder: Path, held_out: bool) -> Diagnosis:
    """Import and diagnose 24 steps of 16 responses, of which more and more have a `#`, worth 1; from step 12 on, all
    rewards are lower by 4."""
    chance = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with (folder / "table.jsonl").open("w") as file:
        for step in range(24):
            for prompt in range(16):
                marked = chance.random() < step / 24
                some = " ".join(chance.choice(["lake", "road", "bird", "tree", "stone", "rain", "warm", "cold"], 6))
                reward = marked + 0.3 * chance.normal() - 4.0 * (step >= 12)
                line = {"step": step, "prompt": f"of {prompt}", "response": some + " #" * marked, "reward": reward}
                file.write(json.dumps(line) + "\n")
    import_run(folder, folder / "run", held_out=held_out)
    return diagnose(RunData(cavesson.open(folder / "run")), RULES)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Diagnosis]:
    folder = tmp_path_factory.mktemp("tables")
    return {held_out: diagnosed(folder / str(held_out), held_out) for held_out in (False, True)}


def test_what_training_samples_is_not_judged_by_held_out_responses(tables: dict[bool, Diagnosis]) -> None:
    """The same lines as training responses show a pattern that spreads."""
    found = {held_out: {one.rule.name for one in said.findings} for held_out, said in tables.items()}
    assert "pattern-spreading" in found[False] and "pattern-spreading" not in found[True]
    open_ones = [one for one in not_excluded(tables[True]) if "pattern-spreading" in one.failure.rules]
    assert HELD_OUT in [reason.reason for reason in open_ones[0].reasons]


def test_what_held_out_responses_show_is_still_found(tables: dict[bool, Diagnosis]) -> None:
    fallen = [one for one in tables[True].findings if one.rule.name == "reward-falls"]
    assert fallen and fallen[0].reading.since is not None and abs(fallen[0].reading.since - 12) <= 5


def test_beside_training_responses_held_out_ones_are_not_judged(tmp_path: Path) -> None:
    """Also in a run of Cavesson's that has not trained yet."""
    write_run(tmp_path / "both", {})
    write_run(tmp_path / "own", {"cavesson": "1.0", "algorithm": "grpo"})
    for name, splits in (("both", ["train", "eval"]), ("own", ["eval"])):
        with Recorder(tmp_path / name, attempt=begin_attempt(tmp_path / name, 0)) as recorder:
            for sample, split in enumerate(splits):
                row = {"sample": [sample], "split": [split], "prompt": ["a"], "response": ["b"], "reward": [1.0]}
                recorder.rollouts(0, row, {})
    both, own = (RunData(cavesson.open(tmp_path / name)) for name in ("both", "own"))
    assert not both.only_held_out and (len(both.rows), len(both.evaluation)) == (1, 1)
    assert not own.only_held_out and (len(own.rows), len(own.evaluation)) == (0, 1)


def test_metrics_of_training_are_judged_beside_held_out_responses(tmp_path: Path) -> None:
    """A loop that records its metrics, and of its responses the held-out ones."""
    write_run(tmp_path, {})
    with Recorder(tmp_path, attempt=begin_attempt(tmp_path, 0)) as recorder:
        for step in range(20):
            row = {"sample": [0], "split": ["eval"], "prompt": ["a"], "response": ["b"], "reward": [1.0]}
            recorder.rollouts(step, row, {})
            recorder.metrics(step, {"policy/entropy": 1.0 + 0.2 * step})
    found = diagnose(RunData(cavesson.open(tmp_path)), RULES)
    assert "entropy-explosion" in [one.rule.name for one in found.findings]
    assert HELD_OUT in [one.reason for one in found.skipped if one.rule == "entropy-collapse"]


def test_groups_of_held_out_responses_follow_from_their_prompts(tmp_path: Path) -> None:
    """Where there are no others; beside training responses they have none."""
    columns = {"prompt": ["a", "b", "a"], "response": ["x", "y", "z"], "reward": [1.0, 2.0, 3.0]}
    for name, first in (("only", "eval"), ("beside", "train")):
        write_run(tmp_path / name, {})
        with Recorder(tmp_path / name, attempt=begin_attempt(tmp_path / name, 0)) as recorder:
            recorder.rollouts(0, {"sample": [0, 1, 2], "split": [first, "eval", "eval"], **columns}, {})
    only, beside = (RunData(cavesson.open(tmp_path / name)) for name in ("only", "beside"))
    group = only.rows["group"]
    assert group[0] == group[2] != group[1]
    assert len(beside.evaluation) == 2 and np.isnan(beside.evaluation["group"]).all()
