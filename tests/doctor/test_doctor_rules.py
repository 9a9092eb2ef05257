"""Every rule fires on a sick run and is silent on its nearest healthy neighbour."""

import numpy as np
import pyarrow as pa
import pytest
import sick_invariants
import sick_kl
import sick_response
import sick_reward
import sick_update
from doctor_helpers import LENGTH, healthy, log_softmax, reading, suited
from sick import resample

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.report.chart import drawn
from cavesson.doctor.rules import RULES
from cavesson.doctor.words import language
from cavesson.record import Recorder, write_rollouts, write_run

BY_NAME = {rule.name: rule for rule in RULES}
SICK = sick_invariants.case | sick_kl.case | sick_update.case | sick_reward.case | sick_response.case


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_nothing_is_wrong_with_a_healthy_run(algorithm, tmp_path):
    made = healthy(algorithm)
    if algorithm != "ppo":
        for name in ("value", "return", "token_reward"):
            del made.tokens[name]
        made.tokens["advantage"] = np.where(made.mask, made.rows["reward"][..., None] - made.rows["reward"].mean(), 0)
    found = diagnose(made.data(tmp_path / "run"), RULES)
    assert [finding.rule.name for finding in found.findings] == []
    assert len(found.healthy) > 35


def test_rules_explain_rules_and_each_once():
    assert {name for rule in RULES for name in rule.explains} <= set(BY_NAME)
    assert [rule.name for rule in RULES if len(set(rule.explains)) < len(rule.explains)] == []


# The recorder keeps no token that the mask leaves out: only imported records can have padding.
IMPORTED = {"padding-counted"}
# tests/faults/test_faults_episodes.py plants these in episodes.
OF_EPISODES = {rule.name for rule in RULES if any(need.startswith(("turns.", "tokens.source")) for need in rule.needs)}


# tests/doctor/test_doctor_response_tokens.py plants these in runs with a vocabulary and prompts.
OF_TOKENS = {"tokens-of-other-text", "prompt-trained", "few-prompts"}
# A setting is not a place in a run; a number that becomes NaN, and the worth of a reward, are not curves.
WITHOUT_PLACE, WITHOUT_CURVE = {"reward-fades"}, {"not-finite", "reward-is-noise"}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [rule.name for rule in RULES if rule.name not in IMPORTED | OF_EPISODES | OF_TOKENS])
def test_fires_on_the_sick_run_alone(name, tmp_path):
    sick, near = SICK[name]
    rule = BY_NAME[name]
    algorithm = suited(rule)
    made, neighbour = healthy(algorithm), healthy(algorithm)
    sick(made)
    near(neighbour)
    found = reading(rule, made, tmp_path / "sick")
    assert found.unhealthy
    assert not reading(rule, neighbour, tmp_path / "near").unhealthy
    assert found.evidence or name in WITHOUT_PLACE
    assert drawn(found, language("en")).startswith("<svg") or name in WITHOUT_CURVE
    assert not found.words.keys() & rule.limits.keys()  # a limit and a word of one name would hide each other
    assert name in UNDECIDED or decides(rule, RunData(cavesson.open(tmp_path / "sick")))


# Each of these has a second reason to report a problem, which another limit, or none, decides.
UNDECIDED = {"negative-kl", "end-forbidden", "ratio-blow-up", "kl-explosion", "same-seed", "value-not-fitting"}


def decides(rule, data):
    """Return whether a limit of the rule that nothing exceeds makes a sick run healthy."""
    found = [rule.statistic(data, **{limit: far}) for limit in rule.limits for far in (-1e9, 1e9)]
    return not rule.limits or any(reading is None or not reading.unhealthy for reading in found)


@pytest.mark.parametrize(("counted", "is_sick"), [("all", True), ("own", False)])
def test_padding_is_seen_where_it_was_recorded(counted, is_sick, tmp_path):
    steps, batch = 6, 8
    write_run(tmp_path, {})
    shape = (steps, batch, LENGTH)
    step, sample, position = (index.ravel() for index in np.indices(shape))
    mask = position < 3 + sample % 4
    delta = np.random.default_rng(1).normal(0.1, 0.02, len(step))
    rows = {name: index.ravel() for name, index in zip(("step", "sample"), np.indices((steps, batch)), strict=True)}
    rows |= {name: [name] * (steps * batch) for name in ("prompt", "response")} | {"reward": np.zeros(steps * batch)}
    tokens = {"step": step, "sample": sample, "position": position, "mask": mask, "logprob": delta - 2}
    tokens["ref_logprob"] = np.full(len(step), -2.0)
    write_rollouts(tmp_path, 0, pa.table(rows), pa.table(tokens))
    with Recorder(tmp_path) as recorder:
        for number in range(steps):
            there = (step == number) & (mask | (counted == "all"))
            recorder.metrics(number, {"kl/objective": float(delta[there].sum() / batch)})
    found = BY_NAME["padding-counted"].statistic(RunData(cavesson.open(tmp_path)))
    assert found.unhealthy == is_sick
    # Of 20 tokens 3 to 6 count, 4.5 on average: 15.5 of padding at 0.1 nats each.
    assert found.seen == pytest.approx(1.55 if is_sick else 0.0, abs=0.05)


def test_the_cause_is_named_and_its_consequences_are_folded_under_it(tmp_path):
    made = healthy()
    resample(made, lambda policy: log_softmax(policy / 0.6))
    found = diagnose(made.data(tmp_path / "run"), RULES)
    assert found.causes[0].rule.name == "temperature-missing"
    assert "negative-kl" not in [finding.rule.name for finding in found.causes]


def test_a_rule_without_its_columns_is_skipped_and_says_what_it_needs(tmp_path):
    made = healthy()
    del made.tokens["sampler_logprob"]
    found = diagnose(made.data(tmp_path / "run"), RULES)
    skipped = {one.rule: one for one in found.skipped}
    assert "tokens.sampler_logprob" in language("zh").reason(skipped["sampler-stale"])
    assert "sampler-stale" not in [rule.name for rule, _ in found.healthy]


def test_data_without_columns_has_no_findings(tmp_path):
    made = healthy()
    folder = made.write(tmp_path / "run")
    found = diagnose(RunData(cavesson.open(folder), sees=()), RULES)
    assert found.findings == () and len(found.skipped) == len(RULES)


def test_a_pattern_that_was_always_there_does_not_spread(tmp_path):
    made = healthy()
    has = np.random.default_rng(2).random(made.rows["reward"].shape) < np.where(np.arange(24) < 12, 0.3, 0.65)[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + " #", made.rows["response"])
    made.rows["reward"] = made.rows["reward"] + has
    assert not reading(BY_NAME["pattern-spreading"], made, tmp_path / "run").unhealthy


def test_spikes_of_a_small_gradient_are_none(tmp_path):
    made = healthy()
    made.metrics["optim/grad_norm"] *= 0.1
    made.metrics["optim/grad_norm"][[9, 12, 15, 18]] = 2.9  # 29 times what it was
    assert not reading(BY_NAME["gradient-spike"], made, tmp_path / "small").unhealthy
    made.metrics["optim/grad_norm"][[9, 12, 15, 18]] = 3.1
    assert reading(BY_NAME["gradient-spike"], made, tmp_path / "large").since == 9


@pytest.mark.slow
def test_spikes_in_fewer_than_a_tenth_of_the_steps_since_the_first_are_none(tmp_path):
    spikes = [6, 16, 26, 36]
    for steps, sick in ((46, True), (47, False)):  # 4 of 40 steps and of 41
        made = healthy(steps=steps)
        made.metrics["optim/grad_norm"][spikes] = 40
        assert reading(BY_NAME["gradient-spike"], made, tmp_path / str(steps)).unhealthy == sick


def test_a_metric_that_was_zero_does_not_spike(tmp_path):
    made = healthy()
    made.metrics["loss/value"][:] = 0.0
    made.metrics["loss/value"][[6, 12, 16, 20]] = 9.0
    found = reading(BY_NAME["value-loss-spike"], made, tmp_path / "run")
    assert not found.unhealthy
    assert found.seen == 0


def test_two_responses_are_enough_to_see_that_they_were_filtered(tmp_path):
    made = healthy(steps=1, batch=2, siblings=1)
    made.tokens["mask"][:] = True
    made.tokens["token_id"][:] = 1
    # 40 tokens are too few to compare: each stands there three times.
    for name, values in made.tokens.items():
        made.tokens[name] = np.tile(values, 3)
    made.tokens["logprob"][:] = -2.0
    made.tokens["sampler_logprob"][:] = -1.9
    found = reading(BY_NAME["filtered-sampling"], made, tmp_path / "run")
    assert found.unhealthy and [(one.step, one.sample) for one in found.evidence] == [(0, 0), (0, 1)]


@pytest.mark.slow
def test_prompts_that_are_drawn_twice_by_chance_are_no_groups(tmp_path):
    made = healthy("grpo")
    made.rows["reward"][:] = 1.0
    assert reading(BY_NAME["zero-variance-groups"], made, tmp_path / "groups").unhealthy
    made.rows["group"] = np.tile([*range(29), 0, 1, 2], (24, 1))  # 26 prompts asked once, 3 twice
    data = made.data(tmp_path / "chance")
    assert BY_NAME["zero-variance-groups"].statistic(data) is None
    assert BY_NAME["prompts-exhausted"].statistic(data) is None


def test_a_reference_that_is_meant_to_be_another_model_differs_from_the_start(tmp_path):
    made = healthy()
    made.tokens["ref_logprob"][0] -= np.where(made.mask[0], 0.5, 0)
    assert reading(BY_NAME["kl-at-start"], made, tmp_path / "copy").unhealthy
    made.info["config"]["reference"] = {"kind": "auto", "path": "another"}
    assert BY_NAME["kl-at-start"].statistic(made.data(tmp_path / "other")) is None
