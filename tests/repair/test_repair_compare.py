"""The rewards of two forks beside each other, and what follows from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

import cavesson
from cavesson.doctor.diagnosis import Detection, Diagnosis
from cavesson.doctor.reading import Reading
from cavesson.doctor.rules import RULES
from cavesson.ops.intervals import Interval
from cavesson.record import Recorder, begin_attempt, write_run
from cavesson.repair import Outcome
from cavesson.repair.compare import COLUMNS, Compared, compare
from cavesson.repair.plan import Plan
from cavesson.repair.show import reason

PLAN = Plan("filtered-sampling", {}, 0, 8, True, "")
Given = dict[tuple[int, str], list[float]]
"""Rewards by step and prompt."""


def made(folder: Path, rewards: Given, held_out: Given | None = None) -> pa.Table:
    """The rows of a record with these rewards."""
    write_run(folder, {})
    both = [(key, "train", some) for key, some in rewards.items()]
    both += [(key, "eval", some) for key, some in (held_out or {}).items()]
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in sorted({key[0] for key, _, _ in both}):
            lines = [(key[1], split, r) for key, split, several in both if key[0] == step for r in several]
            rows: dict[str, Any] = dict(zip(("prompt", "split", "reward"), zip(*lines, strict=True), strict=True))
            count = len(lines)
            recorder.rollouts(step, {**rows, "response": ["x"] * count, "sample": list(range(count))})
            recorder.metrics(step, {"reward/mean": 0.0})
    return cavesson.open(folder).rows(COLUMNS)


def test_the_interval_is_that_of_paired_prompts_relative_to_the_first_step(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    prompts = [f"prompt {i}" for i in range(40)]
    base = {prompt: generator.normal(0, 3) for prompt in prompts}

    def drawn(gain: float) -> dict[tuple[int, str], list[float]]:
        return {(s, p): list(base[p] + gain * (s > 1) + generator.normal(0, 1, 2)) for s in range(4) for p in prompts}

    first, second = drawn(0.5), drawn(0.0)
    for prompt in prompts[:20]:  # the first step answers half of them
        del first[0, prompt], second[0, prompt]
    found = compare(made(tmp_path / "a", first), made(tmp_path / "b", second), 0, 4)
    assert found is not None
    late = [[np.mean([one[s, p] for s in (2, 3)]) for p in prompts] for one in (first, second)]
    early = [[np.mean(one[0, p]) for p in prompts[20:]] for one in (first, second)]
    assert found.at_once == pytest.approx(np.mean(early[0]) - np.mean(early[1]))
    assert found.difference.mean == pytest.approx(np.mean(late[0]) - np.mean(late[1]) - found.at_once)
    # The standard errors of paired t tests, which are independent, add up as squares.
    errors = [stats.ttest_rel(*two).confidence_interval(0.95) for two in (late, early)]
    ends = zip(errors, (39, 19), strict=True)
    variance = sum(((one.high - one.low) / 2 / stats.t.ppf(0.975, degrees)) ** 2 for one, degrees in ends)
    squares = [((one.high - one.low) / 2 / stats.t.ppf(0.975, n)) ** 2 for one, n in zip(errors, (39, 19), strict=True)]
    free = sum(squares) ** 2 / (squares[0] ** 2 / 39 + squares[1] ** 2 / 19)  # Welch and Satterthwaite
    half = stats.t.ppf(0.975, free) * variance**0.5
    assert found.difference.low == pytest.approx(found.difference.mean - half)
    assert found.difference.high == pytest.approx(found.difference.mean + half)
    assert (found.prompts, found.held_out, found.since) == (40, False, 2)
    assert (found.changed, found.unchanged) == pytest.approx((np.mean(late[0]), np.mean(late[1])))


def test_held_out_prompts_decide_and_others_do_not_count(tmp_path: Path) -> None:
    trained = {(step, prompt): [5.0] for step in (0, 1) for prompt in ("a", "b")}
    ours = made(tmp_path / "a", trained, {(2, "p"): [1.0, 3.0], (2, "q"): [0.0]})
    theirs = made(tmp_path / "b", trained, {(0, "p"): [7.0], (2, "p"): [1.0], (2, "q"): [2.0], (2, "r"): [9.0]})
    found = compare(ours, theirs, 0, 2)
    assert found is not None and found.held_out and found.prompts == 2
    assert found.difference.mean == pytest.approx((1 - 2) / 2)
    without = compare(ours, made(tmp_path / "c", trained), 0, 2)
    assert without is not None and not without.held_out and without.difference == Interval(0.0, None, None)
    assert compare(ours, made(tmp_path / "d", {(0, "a"): [1.0], (1, "c"): [1.0]}), 0, 2) is None


@pytest.mark.parametrize(
    ("unchanged", "changed", "high", "verdict", "why"),
    [
        ("found", "gone", 0.5, "recovered", "the finding is gone"),
        ("found", "gone", -0.5, "cannot tell", "the reward gains less"),
        ("found", "gone", None, "recovered", "the finding is gone"),
        ("found", "found", 0.5, "not recovered", "still there"),
        ("gone", "gone", 0.5, "cannot tell", "neither fork has the finding"),
        ("gone", "found", 0.5, "cannot tell", "only the changed fork has the finding"),
        ("found", "not measured", 0.5, "cannot tell", "cannot be measured in the changed fork"),
        ("not measured", "gone", 0.5, "cannot tell", "cannot be measured in the unchanged fork"),
    ],
)
def test_the_verdict(unchanged: str, changed: str, high: float | None, verdict: str, why: str) -> None:
    rule = next(rule for rule in RULES if rule.name == "filtered-sampling")
    diagnoses = {
        "found": Diagnosis((Detection(rule, Reading(1.0, True)),), (), ()),
        "gone": Diagnosis((), ((rule, Reading(0.0, False)),), ()),
        "not measured": Diagnosis((), (), ()),
    }
    reward = None if high is None else Compared(Interval(high - 1, high - 2, high), 0.0, 0.0, 0.0, 9, False, 0)
    outcome = Outcome(PLAN, Path(), diagnoses[changed], diagnoses[unchanged], reward)
    assert outcome.verdict == verdict
    assert why in reason(outcome)
