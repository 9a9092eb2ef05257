"""What other tools are given of a planted run, and how what they say is counted."""

import json
import math
import sys
from pathlib import Path

import pytest
from faults_helpers import CASE, made

import cavesson
from benchmarks.faults.peers import MEANS, NAMES, Said, ask, logs_of, reason_missing, translated
from benchmarks.faults.planted import FAULTS
from benchmarks.faults.results import Result
from cavesson.doctor.rules import RULES

MISSING = reason_missing(Path(sys.executable))
K3 = math.exp(-0.5) - 1 + 0.5
"""Of a token that is e^0.5 times as likely as for the reference."""


def test_both_are_given_what_was_logged_and_what_follows(tmp_path: Path) -> None:
    logs = logs_of(cavesson.open(made(tmp_path)))
    assert logs["config"] == {
        "algorithm": "grpo", "num_generations": 2, "batch_size": 4, "max_completion_length": 4, "beta": 0.125,
        "learning_rate": 0.5, "max_steps": 2,
    }  # fmt: skip
    scalars = logs["rldoctor"][1]
    assert scalars.pop("kl") == pytest.approx(K3, rel=1e-3)
    assert math.isnan(scalars.pop("grad_norm"))
    assert scalars == {
        "step": 1, "reward": 0.3125, "critic/score/min": -0.5, "critic/score/max": 1.0, "eval/reward": 3.0,
        "entropy": 1.0, "critic/advantages/std": 0.5, "frac_reward_zero_std": 0.0, "completions/mean_length": 1.5,
        "completions/clipped_ratio": 0.25, "rewards/kind/mean": 0.625,
    }  # fmt: skip
    before, after = logs["rlprobe"]
    assert (before["nan_count"], after["nan_count"]) == (0, 1)
    assert after["reward_components"] == {"kind": 0.625}
    # The longest response has two tokens: the first is the first of eight parts, the second the fifth.
    assert after["kl_positional"] == pytest.approx([K3, K3], rel=1e-3)
    assert {name for record in (before, after) for name in record} >= {"kl_mean", "adv_std", "truncation_rate", "step"}


def test_every_check_means_causes_that_there_are() -> None:
    rules = {rule.name for rule in RULES}
    assert all(set(means) <= rules for said in MEANS.values() for means in said.values())
    for which in (0, 1):
        names = [name[which] for name in NAMES.values() if name[which]]
        assert len(set(names)) == len(names)


def of(name: str) -> Result:
    return Result(CASE._replace(name=name, algorithm="ppo"), steps=32, named=())


def test_the_planted_cause_counts_under_any_name_of_it() -> None:
    assert "clip-fraction-high" in FAULTS["too-many-epochs"].causes
    said = Said([("clip_saturation", "critical"), ("plateau", "warning"), ("kl_drift", "info")], ["advantage_collapse"])
    found = translated("rldoctor", said, of("too-many-epochs"), consequences=False)
    assert (found.right, found.named[1:]) == ([True, False], ("reward-exhausted",))
    assert found.skipped == ()
    # The update that goes too far leads to KL and a falling reward; what is said once more counts once.
    found = translated("rldoctor", said, of("too-many-epochs"), consequences=True)
    assert found.right == [True]


def test_what_no_check_means_cannot_be_seen() -> None:
    nothing = Said([("THROUGHPUT_ROT", "info"), ("CLIP_SATURATION", "warn")], [])
    found = translated("rlprobe", nothing, of("top-k"), consequences=False)
    assert (found.named, found.skipped) == (("clip-fraction-high",), ("filtered-sampling",))
    skipped = Said([], ["reward_hacking", "length_pathology"])
    assert translated("rldoctor", skipped, of("likes-length"), consequences=False).skipped == ("length-exploited",)
    assert translated("rlprobe", Said([], []), of("likes-length"), consequences=False).skipped == ()


def test_why_they_cannot_be_asked(tmp_path: Path) -> None:
    assert reason_missing(None) == "`--peers-python` was not given"
    assert "cannot be started" in str(reason_missing(tmp_path / "none"))


@pytest.mark.skipif(MISSING is not None, reason=f"the other tools are not installed: {MISSING}")
def test_they_answer(tmp_path: Path) -> None:
    found = ask(Path(sys.executable), [made(tmp_path / "one"), made(tmp_path / "two")])
    assert len(found) == 2
    assert json.dumps(found[0]) == json.dumps(found[1])
    assert "entropy_collapse" in found[0]["rldoctor"].skipped  # fewer than eight steps
