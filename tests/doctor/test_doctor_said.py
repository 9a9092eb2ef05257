"""In episodes, rules on texts read what the policy says: a call has the form that its tool asks for."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rules.pattern import pattern_spreading
from cavesson.record import Recorder, begin_attempt, write_run

CALL = '<call>{"name": "add", "arguments": {"a": 1}}</call> 1 '


def spreading(folder: Path, *, said: bool, turns: bool) -> RunData:
    """A run in which a text spreads because the reward favours it: in a call of a tool, or in the answer."""
    made = healthy()
    steps, batch = made.rows["response"].shape
    has = np.random.default_rng(0).random((steps, batch)) < np.linspace(0.05, 0.95, steps)[:, None]
    plain = made.rows["response"].copy()
    made.rows["response"] = np.where(has, CALL + plain.astype(object), plain)
    made.rows["reward"] = made.rows["reward"] + 3 * made.rows["reward"].std() * has
    made.settle()
    write_run(folder, made.info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step in range(steps):
            rows = {name: column[step] for name, column in made.rows.items()} | {"sample": np.arange(batch)}
            found = made.rows["response"][step] if said else plain[step]
            spoken = {"sample": np.arange(batch), "role": ["assistant"] * batch, "text": found.tolist()}
            tokens = {name: column[step] for name, column in made.tokens.items()}
            recorder.rollouts(step, rows, tokens, *([spoken] if turns else []))
    return RunData(cavesson.open(folder))


@pytest.mark.parametrize(
    ("said", "turns", "alarms"),
    [
        pytest.param(False, True, False, id="in calls"),
        pytest.param(True, True, True, id="in what the policy says"),
        pytest.param(False, False, True, id="in responses without turns"),
    ],
)
def test_a_pattern_spreads_in_what_the_policy_says(tmp_path: Path, said: bool, turns: bool, alarms: bool) -> None:
    found = diagnose(spreading(tmp_path / "run", said=said, turns=turns), [pattern_spreading])
    assert [one.rule.name for one in found.findings] == (["pattern-spreading"] if alarms else [])
