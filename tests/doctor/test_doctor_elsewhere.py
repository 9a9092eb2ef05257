"""Faults as other trainers leave them, in lines without settings and metrics: what each must show by arithmetic."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from doctor_helpers import END, LENGTH, WORDS, Made, healthy, log_softmax, reading, texts
from sick import put, resample
from test_doctor_bare import TOKENS, UNNAMED, causes, diagnosis, lines

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.group_advantages import group_advantages
from cavesson.doctor.rules.invariants import reference_is_policy, reference_replaced, trained_behind_end
from cavesson.doctor.rules.kl import kl_explosion
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.update import advantage_sign, update_kl_large
from cavesson.doctor.rules.value import value_not_fitting
from cavesson.doctor.rules.verifier import verifier_dead
from cavesson.importers import import_run
from cavesson.record import write_vocabulary

HALF = 12
"""The step at which something begins, in the middle of the run."""


def last(made: Made) -> np.ndarray:
    return np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1


def penalty_on_the_size(made: Made) -> None:
    delta = made.tokens["logprob"] - made.tokens["ref_logprob"]
    score = np.where(last(made), made.rows["reward"][..., None], 0.0)
    made.tokens["token_reward"] = np.where(made.mask, score - 0.05 * np.abs(delta), 0.0)


def reward_a_hundredth(made: Made) -> None:
    made.rows["reward"] = made.rows["reward"] / 100
    made.settle()


def reward_on_the_first_token(made: Made) -> None:
    made.tokens["token_reward"] -= np.where(last(made), made.rows["reward"][..., None], 0.0)
    made.tokens["token_reward"][..., 0] += made.rows["reward"]


def scored_by(made: Made, reference: Callable[[int], np.ndarray], first: int = 0) -> None:
    """Let the table of log-probabilities of a step be the reference, from a step on."""
    for step in range(first, len(made.mask)):
        scores = reference(step)[made.tokens["token_id"][step]]
        made.tokens["ref_logprob"][step] = np.where(made.mask[step], scores, 0.0)
    made.settle()


def reference_is_the_policy(made: Made) -> None:
    scored_by(made, lambda step: made.policy[step])


def reference_becomes_the_policy(made: Made) -> None:
    scored_by(made, lambda step: made.policy[step], HALF)


def reference_follows(made: Made) -> None:
    scored_by(made, lambda step: made.policy[step // 8 * 8])


def reference_has_other_weights(made: Made) -> None:
    other = log_softmax(made.policy[0] + np.random.default_rng(9).normal(0, 0.1, len(WORDS)))
    scored_by(made, lambda step: other)


def critic_does_not_learn(made: Made) -> None:
    made.tokens["value"] = np.random.default_rng(1).normal(0.02, 0.01, made.mask.shape)


def critic_keeps_its_first_guess(made: Made) -> None:
    """Each prompt has its own value, about that of its responses, and keeps it while the policy learns."""
    going = made.tokens["token_reward"].sum(-1)
    made.tokens["value"] = going.mean() + 0.1 * np.sin(made.rows["group"])[..., None] + np.zeros(made.mask.shape)


def a_hundredth_gets_fifty(made: Made) -> None:
    lucky = np.random.default_rng(2).random(made.rows["reward"].shape) < 0.01
    made.rows["reward"] = np.where(lucky, 50.0, made.rows["reward"])
    made.settle()


def all_get_minus_one(made: Made, first: int = 0) -> None:
    made.rows["reward"] = made.rows["reward"].copy()
    made.rows["reward"][first:] = -1.0
    made.settle()


def all_get_minus_one_later(made: Made) -> None:
    all_get_minus_one(made, HALF)


def words_return(made: Made, back: int = 1) -> None:
    """Words repeat an earlier one, more and more, which pays 0.5 each; hardly four of them occur twice in a row."""
    chance = np.random.default_rng(3)
    for step in range(len(made.mask)):
        ids, share = made.tokens["token_id"][step], min(0.7, 0.7 * step / HALF)
        for at in range(back, LENGTH):
            again = (chance.random(len(ids)) < share) & (ids[:, at] != END)
            ids[:, at] = np.where(again, ids[:, at - back], ids[:, at])
        put(made, step, ids, made.policy[step])
        made.rows["response"][step] = texts(ids, made.mask[step])
        same = (ids[:, back:] == ids[:, :-back]) & made.mask[step][:, back:]
        made.rows["reward"][step] += 0.5 * same.sum(-1)
    made.settle()


def words_alternate(made: Made) -> None:
    words_return(made, back=2)


def leaps(made: Made, first: int = 1) -> None:
    """A single update takes the policy two nats per token away."""
    other = log_softmax(6 * np.random.default_rng(4).normal(0, 1, len(WORDS)))
    other[END] = np.log(0.1)
    for step in range(first, len(made.policy)):
        made.policy[step] = log_softmax(other)
    resample(made, lambda policy: policy)
    good = np.isin(made.tokens["token_id"], [5, 9, 11]) & made.mask
    made.rows["reward"] = 0.4 * good.sum(-1) + np.random.default_rng(7).normal(0, 0.2, good.shape[:2])
    made.settle()


def leaps_later(made: Made) -> None:
    leaps(made, HALF)


def learns_the_opposite(made: Made) -> None:
    made.rows["reward"] = made.rows["reward"] - np.linspace(0, 1.5, len(made.mask))[:, None]
    made.settle()


@pytest.mark.parametrize(
    ("fault", "cause", "since"),
    [
        # Without settings, a penalty on the size of the log-ratio may have been meant. It is wrong all the same.
        (penalty_on_the_size, "estimator-misplaced", 0),
        (reward_a_hundredth, "penalty-mis-scaled", 0),
        (reward_on_the_first_token, "reward-position", 0),
        (reference_is_the_policy, "reference-is-policy", 0),
        (reference_becomes_the_policy, "reference-is-policy", HALF),
        (reference_follows, "reference-replaced", 8),
        (reference_has_other_weights, "kl-at-start", 0),
        (critic_does_not_learn, "value-not-fitting", 0),
        (critic_keeps_its_first_guess, "value-not-fitting", None),
        (a_hundredth_gets_fifty, "reward-outliers", 2),
        (all_get_minus_one, "verifier-dead", 0),
        (all_get_minus_one_later, "verifier-dead", HALF),
        (words_return, "repetition-loops", None),
        (words_alternate, "repetition-loops", None),
        (leaps, "update-kl-large", 1),
        (leaps_later, "update-kl-large", HALF),
        (learns_the_opposite, "reward-falls", None),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.sampled(8)
def test_the_fault_is_named_first(
    fault: Callable[[Made], None], cause: str, since: int | None, padded: bool, tmp_path: Path
) -> None:
    made = healthy()
    fault(made)
    _, found = diagnosis(made, tmp_path, padded)
    assert causes(found)[:1] == [cause], causes(found)
    if since is not None:
        assert abs(found.causes[0].reading.since - since) <= 1


@pytest.mark.parametrize("since", [0, HALF])
@pytest.mark.parametrize("columns", [("logprobs", "ref_logprobs"), tuple(TOKENS.values())])
def test_padding_that_is_trained(since: int, columns: tuple[str, ...], tmp_path: Path) -> None:
    """Three tokens of padding follow the end, and count as tokens of the response."""
    (file,) = lines(healthy(), tmp_path / "lines").iterdir()
    chance, padded = np.random.default_rng(8), []
    for line in map(json.loads, file.read_text().splitlines()):
        count = min(3, LENGTH - len(line["response_tokens"]))
        if line["response_tokens"][-1] == UNNAMED and line["step"] >= since:
            line["response_tokens"] += ["<pad>"] * count
            line |= {name: line[name] + chance.normal(-1, 0.5, count).tolist() for name in TOKENS.values()}
        padded.append({name: value for name, value in line.items() if name in columns or name not in TOKENS.values()})
    file.write_text("".join(json.dumps(line) + "\n" for line in padded))
    import_run(file.parent, tmp_path / "run")
    found = diagnose(RunData(cavesson.open(tmp_path / "run")), RULES)
    assert causes(found)[:1] == ["trained-behind-end"]
    assert found.causes[0].reading.since == since


def test_a_reference_that_stays_the_policy_was_not_replaced_again_and_again(tmp_path: Path) -> None:
    made = healthy()
    made.tokens["ref_logprob"] = made.tokens["logprob"] - np.where(made.mask, 0.1, 0.0)
    reference_becomes_the_policy(made)
    assert not reading(reference_replaced, made, tmp_path / "stays").unhealthy
    scored_by(made, lambda step: made.policy[0], 18)  # and leaves again
    assert reading(reference_replaced, made, tmp_path / "leaves").unhealthy


def test_a_reference_that_becomes_the_policy_in_the_first_steps(tmp_path: Path) -> None:
    made = healthy()
    scored_by(made, lambda step: made.policy[step], 3)
    assert reading(reference_is_policy, made, tmp_path).unhealthy


@pytest.mark.parametrize("evidence", ["nothing", "metric", "scores", "trend"])
def test_a_frozen_policy_equals_its_reference_by_right(evidence: str, tmp_path: Path) -> None:
    made = healthy()
    del made.metrics["policy/approx_kl"]
    made.policy[:] = made.policy[0]
    made.rows["reward"] = np.random.default_rng(0).normal(0, 1, made.rows["reward"].shape)
    resample(made, lambda policy: policy)
    reference_is_the_policy(made)
    if evidence == "metric":
        made.metrics["policy/approx_kl"] = np.full(len(made.mask), 0.01)
    if evidence == "scores":  # of the same tokens after the same prompts, without a trend
        made.tokens["logprob"] -= 0.1 * (np.arange(len(made.mask)) % 3)[:, None, None] * made.mask
        made.tokens["ref_logprob"] = made.tokens["logprob"].copy()
    if evidence == "trend":
        made.rows["reward"] += np.arange(len(made.mask))[:, None]
    found = reference_is_policy.statistic(made.data(tmp_path))
    assert (found is not None and found.unhealthy) == (evidence != "nothing")


def test_a_small_batch_does_not_look_like_a_leap(tmp_path: Path) -> None:
    """A token can be hundreds of nats from the reference; with 8 responses, it moves the mean of a step far."""
    made = healthy(batch=8)
    del made.metrics["policy/approx_kl"]
    made.tokens["ref_logprob"][[9, 10], 0, 0] -= 100.0
    assert not reading(update_kl_large, made, tmp_path).unhealthy


@pytest.mark.parametrize("gain", [0.0, 2.0])
def test_only_a_reward_that_rises_pays_for_a_large_kl(gain: float, tmp_path: Path) -> None:
    """1.7 nats per token are too many, unless the reward is near its maximum; by chance, its last steps are."""
    made = healthy()
    assert made.rows["reward"][-5:].mean() > made.rows["reward"][:5].mean()
    grown = np.linspace(0, 1.7, len(made.mask))[:, None, None]
    made.tokens["ref_logprob"] = made.tokens["logprob"] - np.where(made.mask, grown, 0.0)
    made.rows["reward"] = made.rows["reward"] + np.linspace(0, gain, len(made.mask))[:, None]
    assert reading(kl_explosion, made, tmp_path).unhealthy == (gain == 0)


@pytest.mark.parametrize("whitened", [False, True])
def test_the_sign_of_advantages_is_known_whatever_their_mean(whitened: bool, tmp_path: Path) -> None:
    made = healthy()
    gap = made.tokens["return"] - made.tokens["value"] + 2.0 * made.mask
    made.tokens["value"] = made.tokens["return"] - gap
    for step, mask in enumerate(made.mask):
        inside = gap[step][mask]
        gap[step][mask] = (inside - inside.mean()) / inside.std() if whitened else inside
    made.tokens["advantage"] = gap
    assert reading(advantage_sign, made, tmp_path / "right").seen == 0
    made.tokens["advantage"] = -gap
    assert reading(advantage_sign, made, tmp_path / "wrong").seen == 1


@pytest.mark.parametrize("steps", [3, HALF])
def test_a_verifier_that_lets_few_responses_pass_is_not_dead_at_the_end(steps: int, tmp_path: Path) -> None:
    """One response in ten passes, and at the end none of eight per step: in three steps with a chance of 8 %."""
    made = healthy(batch=8)
    passes = np.random.default_rng(5).random(made.rows["reward"].shape) < 0.1
    passes[:-HALF, 0] = True
    passes[-steps:] = False
    made.rows["reward"] = passes.astype(float)
    assert reading(verifier_dead, made, tmp_path).unhealthy == (steps == HALF)


def test_advantages_that_lose_their_meaning_in_the_middle(tmp_path: Path) -> None:
    """From there on, the advantages of two responses in five have the other sign: no function of their rewards."""
    made = healthy("grpo")
    made.info["kl"]["place"] = "loss"
    reward = made.rows["reward"].reshape(len(made.mask), -1, 4)
    advantage = ((reward - reward.mean(-1, keepdims=True)) / reward.std(-1, keepdims=True)).reshape(len(made.mask), -1)
    wrong = (np.arange(advantage.shape[1]) * 7 % 10 < 4) & (np.arange(len(made.mask)) >= HALF)[:, None]
    made.tokens["advantage"] = np.where(made.mask, np.where(wrong, -advantage, advantage)[..., None], 0.0)
    found = reading(group_advantages, made, tmp_path)
    assert found.unhealthy and found.since == HALF


def test_shuffled_rewards_that_nothing_shows_are_not_excluded(tmp_path: Path) -> None:
    made = healthy(steps=32)
    made.rows["response"] = made.rows["response"].copy()
    for number, place in enumerate(np.ndindex(*made.rows["response"].shape)):
        made.rows["response"][place] = f"{made.rows['response'][place]} {number}"  # no two are equal
    made.rows["reward"] = np.random.default_rng(6).normal(0, 1, made.rows["reward"].shape)
    made.settle()
    _, found = diagnosis(made, tmp_path)
    (said,) = [one for one in not_excluded(found) if "reward-is-noise" in one.failure.rules]
    assert not said.lacking and "score a few responses twice" in said.reasons[0].reason


def test_rewards_that_words_predict_are_excluded_from_being_noise(tmp_path: Path) -> None:
    made = healthy(steps=32)
    _, found = diagnosis(made, tmp_path)
    assert not [one for one in not_excluded(found) if "reward-is-noise" in one.failure.rules]
    assert reward_is_noise.name in [rule.name for rule, _ in found.healthy]


def test_the_penalty_is_known_wherever_the_score_stands(tmp_path: Path) -> None:
    """One token in five has the score, and any other token of the response is β times its log-ratio."""
    made = healthy()
    made.tokens["mask"] &= np.arange(LENGTH) < 5
    made.settle()
    reward_on_the_first_token(made)
    data, found = diagnosis(made, tmp_path)
    assert causes(found)[:1] == ["reward-position"]
    np.testing.assert_allclose(data.rows["kl_coef"][data.rows.step > 0], 0.05, rtol=0.02)


def test_a_last_word_that_most_responses_share_is_no_end_token_to_train_behind(tmp_path: Path) -> None:
    """Their ends are cut off, so that they end in a full stop, after which one in a hundred goes on for four words."""
    (file,) = lines(healthy(steps=48), tmp_path / "lines").iterdir()
    chance, cut = np.random.default_rng(8), []
    for line in map(json.loads, file.read_text().splitlines()):
        keep = int(chance.integers(3, 15))
        columns = {name: line[name][:keep] for name in ("response_tokens", *TOKENS.values())}
        columns["response_tokens"][-1] = "."
        if chance.random() < 0.008:
            columns["response_tokens"] += ["and", "then", "some", "more"]
            columns |= {name: columns[name] + [-1.0] * 4 for name in TOKENS.values()}
        cut.append(line | columns)
    file.write_text("".join(json.dumps(line) + "\n" for line in cut))
    import_run(file.parent, tmp_path / "run")
    data = RunData(cavesson.open(tmp_path / "run"))
    assert data.setting("eos_token_ids") is not None  # the full stop
    assert not trained_behind_end.statistic(data).unhealthy


@pytest.mark.parametrize("own", [False, True])
def test_what_a_loss_of_another_trainer_counts_is_not_excluded(own: bool, tmp_path: Path) -> None:
    made = healthy()
    made.info |= {"cavesson": "1.0"} if own else {"trainer": "trl 1.10.0"}
    data = made.data(tmp_path)
    write_vocabulary(tmp_path, [word or "<end>" for word in WORDS], [f" {word}" if word else "<end>" for word in WORDS])
    found = diagnose(data, RULES)
    said = [one for one in not_excluded(found) if "trained-behind-end" in one.failure.rules]
    reasons = [reason.reason for one in said for reason in one.reasons]
    assert any("whether its loss keeps to them" in reason for reason in reasons) != own
    assert (said == []) == own
    assert (trained_behind_end in [rule for rule, _ in found.healthy]) == own


@pytest.mark.parametrize("rise", [0.0, 0.8])
def test_a_verifier_with_two_answers_is_not_excluded_to_be_noise_unless_its_reward_rises(
    rise: float, tmp_path: Path
) -> None:
    made = healthy(steps=32)
    for number, place in enumerate(np.ndindex(*made.rows["response"].shape)):
        made.rows["response"][place] = f"{made.rows['response'][place]} {number}"  # no two are equal
    right = np.random.default_rng(6).random(made.rows["reward"].shape) < 0.1 + np.linspace(0, rise, 32)[:, None]
    made.rows["reward"] = right.astype(float)
    made.settle()
    _, found = diagnosis(made, tmp_path)
    open_rules = [reason.rule for one in not_excluded(found) for reason in one.reasons]
    assert ("reward-is-noise" in open_rules) == (rise == 0)


@pytest.mark.parametrize("leaps_too", [False, True])
def test_a_single_large_update_counts_if_the_distance_from_the_reference_leaps(leaps_too: bool, tmp_path: Path) -> None:
    made = healthy()
    if leaps_too:
        leaps_later(made)
    made.metrics["policy/approx_kl"] = np.where(np.arange(24) == HALF - 1, 0.4, 0.02)
    found = reading(update_kl_large, made, tmp_path)
    assert found.unhealthy == leaps_too
    if leaps_too:
        assert abs(found.since - HALF) <= 1 and found.seen > 0.2


def test_a_reference_that_follows_the_policy_does_not_show_how_far_an_update_went(tmp_path: Path) -> None:
    """Without a fixed reference, an update that moves the policy is not a ratio that was wrong before it."""
    made = healthy()
    made.metrics["policy/approx_kl"] = np.full(24, 0.002)
    del made.metrics["policy/first_ratio_error"]
    reference_is_the_policy(made)
    made.tokens["ref_logprob"][1] += 1e-6 * made.mask[1]
    found = diagnose(made.data(tmp_path), RULES)
    assert causes(found)[:1] == ["reference-is-policy"] and "ratio-not-one" not in causes(found)


@pytest.mark.parametrize(("left", "sick"), [(1.05, False), (1.3, True)])
def test_a_critic_is_worse_than_the_mean_if_it_is_so_by_a_tenth(left: float, sick: bool, tmp_path: Path) -> None:
    """V = the mean of the returns plus noise, so that mean((G − V)²)/Var(G) = 1 + the share of the noise."""
    made = healthy()
    going, chance = made.tokens["return"], np.random.default_rng(4)
    for step, mask in enumerate(made.mask):
        inside = going[step][mask]
        noise = chance.normal(0, 1, len(inside))
        noise = (noise - noise.mean()) / noise.std() * inside.std() * np.sqrt(left - 1)
        made.tokens["value"][step][mask] = inside.mean() + noise
    found = reading(value_not_fitting, made, tmp_path)
    assert found.seen == pytest.approx(1 - left, abs=0.05)
    assert found.unhealthy == sick
