"""What begins late in a long run is found, and when it began."""

from pathlib import Path

import numpy as np
import pytest
import sick_invariants
import sick_kl
import sick_response
import sick_reward
import sick_update
from doctor_helpers import healthy, suited
from late import BEFORE, begun, cut, late, longer, short

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.recorded import CHANCE
from cavesson.doctor.rules import RULES
from cavesson.doctor.windows import lengths, windows

BY_NAME = {rule.name: rule for rule in RULES}
SICK = sick_invariants.case | sick_kl.case | sick_update.case | sick_reward.case | sick_response.case
IMPORTED = {"padding-counted"}  # the recorder keeps no token that the mask leaves out
# The cases of these are slow, or begin from another length than the healthy run before them.
LATER = {"pattern-collapse", "length-bias", "coefficient-runaway", "length-exploited", "truncated"}
# The healthy run has no episodes; faults of these begin late in tests/faults/test_faults_episodes.py.
EPISODES = {"results-cut"}
WINDOWS = sorted(rule.name for rule in RULES if rule.windows and rule.name not in IMPORTED | LATER | EPISODES)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the healthy parts of the runs."""
    return tmp_path_factory.mktemp("begun")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WINDOWS)
def test_what_begins_late_is_found_when_it_began(name, before, tmp_path):
    rule = BY_NAME[name]
    algorithm = suited(rule)
    data = late(SICK[name][0], begun(before, algorithm), tmp_path / "run")
    (found,) = diagnose(data, [rule]).findings
    reading = found.reading
    assert reading.between[0] <= reading.since <= reading.between[1]
    # Some of the changes grow over 12 of the 24 steps.
    assert BEFORE - (10 if name != "reward-is-noise" else 30) <= reading.since <= BEFORE + 13  # few responses are equal
    assert reading.between[0] <= BEFORE + 13 and reading.between[1] >= BEFORE - 3


@pytest.mark.parametrize(("name", "change"), [("truncated", cut), ("length-exploited", longer)])
def test_late_truncation_and_a_late_exploit_of_length_are_dated_to_five_steps(name, change, before, tmp_path):
    data = late(change, begun(before, "ppo", short), tmp_path / "run")
    (found,) = diagnose(data, [BY_NAME[name]]).findings
    assert abs(found.reading.since - BEFORE) <= 5
    assert diagnose(RunData(cavesson.open(begun(before, "ppo", short))), [BY_NAME[name]]).findings == ()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_nothing_is_wrong_with_a_long_healthy_run(algorithm, before):
    made = RunData(cavesson.open(begun(before, algorithm)))
    judged = [rule for rule in RULES if rule.windows]
    assert [finding.rule.name for finding in diagnose(made, judged).findings] == []


def test_windows_are_the_latest_steps_and_share_the_level_of_one_test(tmp_path):
    data = healthy(steps=70, batch=8).data(tmp_path / "run")
    parts = list(windows(data))
    assert [part.rows.steps.tolist() for part in parts] == [list(range(38, 70)), list(range(54, 70))]
    assert sum(part.chance for part in parts) == pytest.approx(CHANCE)
    for part in parts:
        first = part.rows.steps[0]
        assert part.whole is data and data.whole is data
        for name in ("logprob", "value"):
            np.testing.assert_array_equal(part.sample[name], data.sample[name][data.sample.step >= first])
        np.testing.assert_array_equal(part.rows["reward"], data.rows["reward"][data.rows.step >= first])
        assert part.metric("policy/ratio").step.tolist() == part.rows.steps.tolist()


@pytest.mark.parametrize("steps", [31, 32, 100, 1000])
def test_whatever_began_at_least_sixteen_steps_ago_fills_a_window_and_more_than_half_of_the_next(steps):
    several = lengths(steps / 2)
    assert several == sorted(several, reverse=True) and all(16 <= length <= steps / 2 for length in several)
    for ago in range(16, (several or [0])[0]):
        fills = max(length for length in several if length <= ago)
        assert any(fills < length < 2 * ago + 1 for length in several)


def test_a_short_run_has_no_windows(tmp_path):
    assert list(windows(healthy(batch=8).data(tmp_path / "run"))) == []
