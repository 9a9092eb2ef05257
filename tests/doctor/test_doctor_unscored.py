"""Responses that no reward judges: a record has no reward, advantage, value and log-probability of theirs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_helpers import Made, check_shares, healthy, suited
from test_doctor_rules import BY_NAME, SICK

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.reading import Reading
from cavesson.doctor.rules import RULES
from cavesson.record import Recorder, begin_attempt, write_run

NOT_SCORED = ("token_reward", "advantage", "return", "value", "logprob", "ref_logprob", "entropy")
# Whitening is of the responses that are scored; what is taken away here was whitened with the others.
OTHERWISE = {"rewards-shifted"}
# The share of the responses that no reward judges; a logged KL is judged in steps of which every response is known.
SHARE = {"unknown-estimate": 0.02}


def partly_scored(made: Made, folder: Path, share: float) -> RunData:
    """Record a run in which no reward judges a share of the responses, and none of those of step 5."""
    unscored = np.random.default_rng(3).random(made.mask.shape[:2]) < share
    unscored[5] = True
    write_run(folder, made.info)
    with Recorder(folder, attempt=begin_attempt(folder, start_step=0)) as recorder:
        for step, left_out in enumerate(unscored):
            for chosen in (~left_out, left_out):
                if chosen.any():
                    recorder.rollouts(step, *_part(made, step, chosen, is_scored=chosen is not left_out))
            recorder.metrics(step, {name: float(values[step]) for name, values in made.metrics.items()})
    return RunData(cavesson.open(folder))


def _part(made: Made, step: int, chosen: Any, *, is_scored: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    rows = {name: np.asarray(column[step])[chosen] for name, column in made.rows.items()}
    rows |= {"sample": np.flatnonzero(chosen)}
    tokens = {name: column[step][chosen] for name, column in made.tokens.items()}
    if is_scored:
        return rows, tokens
    rows |= {"reward": [None] * len(rows["sample"])}
    rows |= {"reward_parts": [{}] * len(rows["sample"])} if "reward_parts" in rows else {}
    rows.pop("shaped_reward", None)
    return rows, {name: column for name, column in tokens.items() if name not in NOT_SCORED}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_own", [True, False], ids=["own", "foreign"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_nothing_is_wrong_with_a_run_of_which_a_part_is_not_scored(
    algorithm: str, share: float, is_own: bool, tmp_path: Path
) -> None:
    made = healthy(algorithm)
    if is_own:
        made.info["cavesson"] = "1.0"
    if algorithm != "ppo":
        for name in ("value", "return", "token_reward"):
            del made.tokens[name]
        made.tokens["advantage"] = np.where(made.mask, made.rows["reward"][..., None] - made.rows["reward"].mean(), 0)
    found = diagnose(partly_scored(made, tmp_path / "run", share), RULES)
    assert [finding.rule.name for finding in found.findings] == []
    assert len(found.healthy) > 30


def has_nan(reading: Reading) -> bool:
    numbers = [one for one in (reading.seen, *reading.words.values()) if isinstance(one, float)]
    return bool(np.isnan(numbers).any())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [rule.name for rule in RULES if rule.name in SICK.keys() - OTHERWISE])
def test_a_sick_run_is_recognised_by_the_responses_that_are_scored(name: str, tmp_path: Path) -> None:
    sick, near = SICK[name]
    rule = BY_NAME[name]
    for case, is_sick in ((sick, True), (near, False)):
        made = healthy(suited(rule))
        case(made)
        found = rule.statistic(partly_scored(made, tmp_path / str(is_sick), SHARE.get(name, 0.2)))
        assert (found is not None and found.unhealthy) == is_sick
        if found is not None:
            check_shares(rule, found)
            assert not has_nan(found), found


def test_the_critic_is_judged_though_an_early_response_is_not_scored(tmp_path: Path) -> None:
    """Its unknown returns make no other response's unknown."""
    sick, near = SICK["value-constant"]
    for case, is_sick in ((sick, True), (near, False)):
        made = healthy("ppo")
        case(made)
        found = BY_NAME["value-constant"].statistic(partly_scored(made, tmp_path / str(is_sick), 0.1))
        assert found is not None and found.unhealthy == is_sick
