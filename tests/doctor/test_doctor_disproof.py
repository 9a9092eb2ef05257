"""A measured fact vetoes what a rule infers: what was recorded counts for more than what it looks like."""

from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import END, Made, healthy, log_softmax, reading
from sick import resample

from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.diversity import entropy_explosion
from cavesson.doctor.rules.group_advantages import group_advantages
from cavesson.doctor.rules.invariants import kl_at_start, ratio_not_one
from cavesson.doctor.rules.kl import negative_kl, unknown_estimate
from cavesson.doctor.rules.mismatch import sampler_stale
from cavesson.doctor.rules.sampling import end_forbidden
from cavesson.doctor.rules.verifier import verifier_dead

EXACT = {
    "not-finite", "end-not-trained", "reward-position", "reward-accounting", "rewards-shifted", "retokenised",
    "penalty-wrong", "padding-counted", "stops-generating", "false-truncation", "advantage-sign", "advantage-scale",
    "ratio-blow-up", "inserted-tokens-learned",
}  # fmt: skip
"""Errors that compare recorded numbers and infer nothing."""


def found(rule: Rule, made: Made, folder: Path) -> bool:
    return bool(diagnose(made.data(folder), [rule]).findings)


def test_every_error_names_what_would_disprove_it() -> None:
    assert {rule.name for rule in RULES if rule.severity == "error" and rule.disproof is None} == EXACT
    for rule in RULES:
        assert rule.disproof is None or (rule.disproof.columns and rule.disproof.shows), rule.name


def with_lengths(length: np.ndarray) -> Made:
    """Return a healthy run of another trainer with responses of other lengths [24, 64] and words."""
    made = healthy(batch=64)
    made.info["config"]["sampling"].pop("min_new_tokens", None)
    made.info["trainer"] = "trl"
    chance = np.random.default_rng(3)
    mask = np.arange(made.mask.shape[-1]) < length[..., None]
    ids = np.where(made.tokens["token_id"] == END, 1 + np.arange(made.mask.shape[-1]) % 19, made.tokens["token_id"])
    made.tokens["mask"] = mask
    made.tokens["token_id"] = np.where(mask, ids, END)
    for name in ("logprob", "ref_logprob"):
        made.tokens[name] = np.where(mask, np.minimum(made.tokens[name], -0.5), 0.0)
    made.tokens["sampler_logprob"] = made.tokens["logprob"].copy()
    made.rows["response"] = np.array(
        [[" ".join(f"w{i}" for i in chance.integers(0, 999, n)) for n in line] for line in length], object
    )
    return made


@pytest.mark.parametrize(("sampler", "named"), [("absent", True), ("same", False)])
def test_a_short_right_answer_is_no_ban_where_the_sampler_says_so(sampler: str, named: bool, tmp_path: Path) -> None:
    """Answers of three words and an end are common, shorter ones do not occur, and longer ones often do."""
    chance = np.random.default_rng(3)
    made = with_lengths(np.where(chance.random((24, 64)) < 0.4, 4, chance.integers(5, 18, (24, 64))))
    if sampler == "absent":
        del made.tokens["sampler_logprob"]
    assert found(end_forbidden, made, tmp_path) == named


@pytest.mark.parametrize(("early", "named"), [(0.0, True), (0.05, False)])
def test_ends_before_a_position_disprove_a_ban_until_there(early: float, named: bool, tmp_path: Path) -> None:
    """The sampler raises all tokens before the ninth, as where ends are forbidden there."""
    chance = np.random.default_rng(4)
    made = with_lengths(np.where(chance.random((24, 64)) < early, 6, chance.integers(9, 18, (24, 64))))
    is_raised = made.mask & (np.arange(made.mask.shape[-1]) < 8)
    made.tokens["sampler_logprob"] += np.where(is_raised, 0.1, 0.0)
    assert found(end_forbidden, made, tmp_path) == named


def averaged_over_update(made: Made, trainer: str | None) -> Made:
    """Log the mean of k3 per token over the update: half way from the policy of a step to that of the next."""
    delta = np.where(made.mask, made.tokens["logprob"] - made.tokens["ref_logprob"], 0.0)
    delta *= np.linspace(0, 4, len(delta))[:, None, None]
    made.tokens["logprob"] = made.tokens["ref_logprob"] + delta
    k3 = (np.exp(-delta) - 1 + delta).sum((1, 2)) / made.mask.sum((1, 2))
    made.metrics["kl"] = (k3 + np.append(k3[1:], 2 * k3[-1] - k3[-2])) / 2
    made.metrics.pop("kl/objective", None)
    if trainer:
        made.info = {"trainer": trainer, "algorithm": "grpo"}
    return made


@pytest.mark.parametrize("steps", [2, 3, 6, 24])
@pytest.mark.parametrize("trainer", ["trl", "openrlhf", "verl"])
def test_a_kl_that_is_averaged_over_the_update_is_known(steps: int, trainer: str, tmp_path: Path) -> None:
    assert not found(unknown_estimate, averaged_over_update(healthy("grpo", steps=steps), trainer), tmp_path)


def test_a_kl_that_no_policy_of_the_update_has_is_not_known(tmp_path: Path) -> None:
    made = averaged_over_update(healthy("grpo"), "trl")
    made.metrics["kl"] = 30.0 + np.arange(24)
    assert found(unknown_estimate, made, tmp_path)


@pytest.mark.parametrize(("begins", "named"), [("uniform", False), ("sharp", True)])
def test_an_untrained_policy_has_not_exploded(begins: str, named: bool, tmp_path: Path) -> None:
    """Of 128 tokens, all are as likely from the first step on, or from the fourth one on."""
    made, chance = healthy(), np.random.default_rng(0)
    level = np.full(24, np.log(128.0))
    level[: 4 if begins == "sharp" else 0] = 1.0
    made.tokens["token_id"] = chance.integers(0, 128, made.mask.shape)
    made.tokens["entropy"] = np.where(made.mask, level[:, None, None] - np.linspace(0, 0.3, 24)[:, None, None], 0.0)
    made.tokens["logprob"] = np.where(made.mask, -level[:, None, None], 0.0)
    assert found(entropy_explosion, made, tmp_path) == named


@pytest.mark.parametrize(("sampler", "named"), [("reference", False), ("policy", True)])
def test_a_sampler_that_agrees_with_the_reference_acquits_it(sampler: str, named: bool, tmp_path: Path) -> None:
    """The trainer's own scores are off from the first step on, or the reference is another model."""
    made, chance = healthy(), np.random.default_rng(1)
    made.tokens["logprob"] += np.where(made.mask, chance.normal(0, 0.3, made.mask.shape), 0.0)
    made.tokens["sampler_logprob"] = made.tokens["ref_logprob" if sampler == "reference" else "logprob"].copy()
    assert found(kl_at_start, made, tmp_path) == named


def test_a_ratio_that_was_measured_counts_for_more_than_a_bound(tmp_path: Path) -> None:
    """In bfloat16, the update of the first step looks larger than the policy has moved by the next one."""
    made = healthy()
    made.info["config"]["model"]["dtype"] = "bfloat16"
    made.metrics["policy/first_ratio_error"] = np.full(24, 0.01)
    made.metrics.pop("policy/first_approx_kl", None)
    made.metrics["policy/approx_kl"][0] = 0.5
    assert not reading(ratio_not_one, made, tmp_path / "measured").unhealthy
    del made.metrics["policy/first_ratio_error"]
    assert reading(ratio_not_one, made, tmp_path / "bound").unhealthy


@pytest.mark.parametrize(("lag", "stale"), [(1, False), (3, False), (0, True)])
def test_a_sampler_that_is_behind_on_purpose_is_not_stuck(lag: int, stale: bool, tmp_path: Path) -> None:
    """The samples come from the first policy, while the policy moves on; the sampler may be known to be behind."""
    made = healthy()
    resample(made, lambda policy: made.policy[0])
    made.rows["policy_version"] = np.tile(np.maximum(np.arange(24) - lag, 0)[:, None], (1, 32))
    assert found(sampler_stale, made, tmp_path) == stale


@pytest.mark.parametrize(("lag", "named"), [(1, False), (0, True)])
def test_a_kl_of_responses_of_older_weights_may_be_negative(lag: int, named: bool, tmp_path: Path) -> None:
    made = healthy()
    made.tokens["sampler_logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, 0.01, 0.0)
    made.tokens["logprob"] = made.tokens["ref_logprob"] - np.where(made.mask, 0.2, 0.0)
    made.rows["policy_version"] = np.tile((np.arange(24) - lag)[:, None], (1, 32))
    assert found(negative_kl, made, tmp_path) == named


@pytest.mark.parametrize(("said", "named"), [("the answer is 7", True), ("the answer is 17", False)])
def test_a_verifier_that_rejects_wrong_answers_is_alive(said: str, named: bool, tmp_path: Path) -> None:
    """Everything is rejected; the right answer is 7."""
    made = healthy()
    made.rows["reward"] = np.zeros((24, 32))
    made.rows["response"] = np.full((24, 32), said, object)
    made.rows["ground_truth"] = np.full((24, 32), "7", object)
    assert found(verifier_dead, made, tmp_path) == named


@pytest.mark.parametrize(("weak", "named"), [(0.0, False), (-1.0, True)])
def test_responses_that_are_chosen_are_not_compared(weak: float, named: bool, tmp_path: Path) -> None:
    """RAFT learns from the best response of each prompt; 1 and −1 instead are no rewards minus a mean."""
    made = healthy("raft")
    reward = made.rows["reward"].reshape(24, 8, 4)
    best = (reward == reward.max(-1, keepdims=True)).reshape(24, 32, 1)
    made.tokens["advantage"] = np.where(made.mask, np.where(best, 1.0, weak), 0.0)
    assert found(group_advantages, made, tmp_path) == named


def test_a_filter_is_measured_where_the_sampler_was_recorded(tmp_path: Path) -> None:
    """Tokens that are too likely on average; the sampler's own log-probabilities are those of the trainer."""
    made = healthy(batch=64)
    resample(made, lambda policy: log_softmax(np.where(policy < np.quantile(policy, 0.4), -30.0, policy)))
    names = [one.rule.name for one in diagnose(made.data(tmp_path / "inferred"), RULES).findings]
    made.tokens["sampler_logprob"] = made.tokens["logprob"].copy()
    measured = [one.rule.name for one in diagnose(made.data(tmp_path / "measured"), RULES).findings]
    assert "filtered-sampling" in names and "filtered-sampling" not in measured
