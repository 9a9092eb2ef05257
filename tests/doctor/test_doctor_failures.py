"""Which failures a diagnosis excludes: those whose own rules could judge, or that the run cannot have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doctor_helpers import Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import NOTHING, Detection, Diagnosis, diagnose
from cavesson.doctor.failures import FAILURES, Failure, not_excluded
from cavesson.doctor.reading import Reading, Skipped
from cavesson.doctor.rules import RULES
from cavesson.findings.words import Phrase
from cavesson.record import Recorder, write_run

BY_NAME = {rule.name: rule for rule in RULES}
WELL = Reading(1.0, False)
UNJUDGED = {
    "nothing to measure": Skipped("", 0, NOTHING),
    "too short": Skipped("", 0, Phrase("needs 20 steps; the record has 3"), undecided=True),
    "not recorded": Skipped("", 0, Phrase("not recorded"), lacking=("rows.reward",)),
}


def open_titles(diagnosis: Diagnosis) -> list[str]:
    return [str(one.failure.title) for one in not_excluded(diagnosis)]


def test_each_rule_looks_for_one_failure_itself() -> None:
    rules = [rule for failure in FAILURES for rule in failure.rules]
    assert set(rules) <= set(BY_NAME) and len(rules) == len(set(rules))


@pytest.mark.parametrize("why", UNJUDGED)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.rules[0])
def test_a_failure_is_open_if_one_of_its_own_rules_could_not_judge_whatever_all_others_said(
    failure: Failure, why: str
) -> None:
    for name in failure.rules:
        rule, others = BY_NAME[name], [one for one in RULES if one.name not in failure.rules]
        one = UNJUDGED[why]
        skipped = Skipped(name, rule.number, one.reason, one.words, one.lacking, one.undecided)
        for found in (
            Diagnosis((), tuple((other, WELL) for other in RULES if other is not rule), (skipped,)),
            Diagnosis(tuple(Detection(other, Reading(1.0, True)) for other in others), (), (skipped,)),
        ):
            assert open_titles(found) == [failure.title], name


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.rules[0])
def test_a_failure_is_excluded_if_its_own_rules_could_judge_though_no_other_could(failure: Failure) -> None:
    own = tuple((BY_NAME[name], WELL) for name in failure.rules)
    others = tuple(Skipped(one.name, one.number, NOTHING) for one in RULES if one.name not in failure.rules)
    assert failure.title not in open_titles(Diagnosis((), own, others))


def test_failures_that_would_explain_a_cause_come_first_then_those_that_fewest_rules_looked_for() -> None:
    def unjudged(*names: str) -> tuple[Skipped, ...]:
        return tuple(Skipped(one, 0, Phrase("not recorded"), lacking=("rows.reward",)) for one in names)

    # One of five rules, all of one, and one of three.
    skipped = unjudged("filtered-sampling", "double-start", "advantage-sign")
    openness = ["prompts are not as the model expects them", "advantages are computed wrongly",
                "responses are not sampled from the policy that learns"]  # fmt: skip
    assert open_titles(Diagnosis((), (), skipped)) == openness
    explained = Diagnosis((Detection(BY_NAME["mismatch-growing"], Reading(1.0, True)),), (), skipped)
    assert [one.rule for one in skipped if "mismatch-growing" in BY_NAME[one.rule].explains] == ["filtered-sampling"]
    assert open_titles(explained)[0] == "responses are not sampled from the policy that learns"


def test_a_falling_reward_does_not_hide_that_no_advantages_were_seen() -> None:
    skipped = Skipped("group-advantages", 72, Phrase("not recorded"), lacking=("tokens.advantage",))
    found = Diagnosis((Detection(BY_NAME["reward-falls"], Reading(1.0, True)),), (), (skipped,))
    assert open_titles(found) == ["advantages are computed wrongly"]


def without_penalty(made: Made) -> None:
    made.rows["kl_coef"] = np.zeros_like(made.rows["kl_coef"])


def in_loss(made: Made) -> None:
    made.info["kl"] = {"place": "loss", "estimator": "k3"}


def not_white(made: Made) -> None:
    made.info["config"]["ppo"]["whiten_advantages"] = False


def another_reference(made: Made) -> None:
    made.info["config"]["reference"] = {"path": "another"}


def all_alike(made: Made) -> None:
    made.tokens["mask"] = np.ones_like(made.mask)
    made.settle()


def nothing(made: Made) -> None:
    """As it is."""


PENALTY = ["token_reward", "return", "value"]
RAFT = ["ref_logprob", "token_reward", "value", "advantage", "return"]
CANNOT: dict[str, tuple[str, Callable[[Made], None], list[str], dict[str, str]]] = {
    "a penalty of 0": ("grpo", without_penalty, PENALTY, {
        "penalty-wrong": "its coefficient is 0", "penalty-mis-scaled": "its coefficient is 0"}),
    "a penalty in the loss": ("grpo", in_loss, PENALTY, {"penalty-wrong": "in the loss"}),
    "rewards of responses": ("grpo", nothing, PENALTY, {
        "reward-position": "whole responses", "reward-accounting": "whole responses"}),
    "rewards that are not whitened": ("ppo", nothing, [], {"rewards-shifted": "not whitened"}),
    "advantages that are not whitened": ("ppo", not_white, [], {"advantage-scale": "not whitened"}),
    "another reference": ("ppo", another_reference, [], {"kl-at-start": "another model"}),
    "raft": ("raft", nothing, RAFT, {
        "negative-kl": "no reference", "kl-at-start": "no reference", "reference-replaced": "no reference",
        "update-kl-large": "no probability ratio", "ratio-not-one": "no probability ratio"}),
    "one length": ("ppo", all_alike, [], {"length-exploited": "do not become longer"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", CANNOT)
def test_what_a_run_cannot_have_is_excluded(kind: str, tmp_path: Path) -> None:
    algorithm, change, lacking, reasons = CANNOT[kind]
    made = healthy(algorithm)
    change(made)
    for name in lacking:
        del made.tokens[name]
    made.metrics = {name: values for name, values in made.metrics.items() if not name.startswith(("kl", "policy"))}
    found = diagnose(made.data(tmp_path), RULES)
    skipped = {one.rule: one for one in found.skipped if one.rule in reasons}
    assert {rule: words in str(skipped[rule].reason) for rule, words in reasons.items()} == dict.fromkeys(reasons, True)
    assert not any(one.lacking or one.undecided for one in skipped.values())


@pytest.mark.parametrize("algorithm", ["grpo", None])
def test_a_penalty_that_may_be_there_is_not_excluded(algorithm: str | None, tmp_path: Path) -> None:
    """The same record with a coefficient above 0, and no word of the place of the penalty."""
    made = healthy("grpo")
    made.info = {"algorithm": algorithm} if algorithm else {}
    for name in PENALTY:
        del made.tokens[name]
    assert "the KL penalty has the wrong sign, size or place" in open_titles(diagnose(made.data(tmp_path), RULES))


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward-model", None, "grpo"])
def test_a_run_that_learns_from_given_texts_lacks_no_rollouts(algorithm: str | None, tmp_path: Path) -> None:
    info: dict[str, Any] = {"algorithm": algorithm} if algorithm else {}
    write_run(tmp_path, info)
    with Recorder(tmp_path) as recorder:
        for step in range(30):
            recorder.metrics(step, {"loss": 2.0 - step / 30, "optim/grad_norm": 0.5, "time/step": 1.0})
    found = diagnose(RunData(cavesson.open(tmp_path)), RULES)
    supervised = algorithm in ("sft", "dpo", "reward-model")
    assert (open_titles(found) == []) == supervised
    assert {"not-finite", "zero-gradient", "stalls"} <= {rule.name for rule, _ in found.healthy}


def paid(made: Made) -> None:
    made.rows["reward"] = made.rows["reward"] + (made.rows["finish_reason"] == "length")


def paid_and_grown(made: Made) -> None:
    made.rows["finish_reason"][:8, ::2] = "eos"
    paid(made)


def of_one_length(made: Made) -> None:
    made.info["config"]["sampling"]["min_new_tokens"] = made.info["config"]["sampling"]["max_new_tokens"]


def of_drawn_lengths(made: Made) -> None:
    made.info["config"]["sampling"] = {"random_length": [4, 20]}


@pytest.mark.parametrize(
    ("ended", "change", "is_open"),
    [
        (3, nothing, True),
        (4, nothing, False),
        (3, paid, True),
        (3, paid_and_grown, False),
        (3, of_one_length, False),
        (3, of_drawn_lengths, False),
    ],
    ids=["29 of 32", "28 of 32", "paid", "paid and grown", "of one length", "of drawn lengths"],
)
def test_truncation_from_the_start_is_not_excluded_unless_it_is_wanted(
    ended: int, change: Callable[[Made], None], is_open: bool, tmp_path: Path
) -> None:
    """29 of 32 responses are 91 %, 28 are 88 %; those of each step that end by themselves change places."""
    made = healthy()
    made.rows["finish_reason"][:] = "length"
    for step, reasons in enumerate(made.rows["finish_reason"]):
        reasons[(5 * step + 8 * np.arange(ended)) % 32] = "eos"
    change(made)
    found = diagnose(made.data(tmp_path), [BY_NAME["truncated"]])
    assert found.findings == () and [one.undecided for one in found.skipped] == [True] * is_open
    assert open_titles(found) == ["responses are truncated"] * is_open
