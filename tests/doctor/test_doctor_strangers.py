"""What other people's records have that is not a problem, and problems that they hide."""

import numpy as np
import pytest
from doctor_helpers import END, Made, healthy, reading

from cavesson.doctor.derive.critic import scales
from cavesson.doctor.diagnosis import Diagnosis, diagnose
from cavesson.doctor.recording import needs, recipes, recordable
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.diversity import entropy_explosion
from cavesson.doctor.rules.invariants import same_seed
from cavesson.doctor.rules.kl import unknown_estimate
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.pattern import pattern_spreading
from cavesson.doctor.rules.reward import one_part_dominates, reward_outliers, zero_variance_groups
from cavesson.doctor.rules.system import rollouts_fail
from cavesson.doctor.rules.token_rewards import penalty_wrong, reward_accounting, reward_position
from cavesson.doctor.rules.update import not_finite
from cavesson.doctor.rules.value import value_not_fitting, value_start

HALF = 12


def names(found: Diagnosis) -> list[str]:
    return [one.rule.name for one in found.findings]


def at(steps: int, *missing: int) -> np.ndarray:
    values = np.ones(steps)
    values[list(missing)] = np.nan
    return values


@pytest.mark.parametrize(
    "name, values, sick",
    [
        ("eval/pass_at_8", at(24, *range(1, 12), *range(13, 24)), False),  # measured at every twelfth step
        ("bonus", at(24, 3, 9), False),
        ("bonus", at(24, *range(24)), False),
        ("bonus", at(24, *range(2, 24)), False),
        ("bonus", at(24, *range(3, 24)), True),
        ("policy/loss", at(24, 3), True),
        ("train/grad_norm", at(24, 3), True),
        ("value/loss", at(24, 3), True),
        ("eval/loss", at(24, 3, 9), False),
    ],
)
def test_a_metric_may_be_nan_where_it_does_not_apply(name, values, sick, tmp_path):
    made = healthy()
    made.metrics[name] = values
    assert reading(not_finite, made, tmp_path).unhealthy == sick


def test_a_part_of_the_reward_may_be_nan_where_it_does_not_apply(tmp_path):
    made, chance = healthy(), np.random.default_rng(0)
    parts = chance.normal(0, 1, made.rows["reward"].shape)
    made.rows["reward_parts"] = np.frompyfunc(lambda one: {"one": one, "two": np.nan}, 1, 1)(parts)
    assert not reading(not_finite, made, tmp_path / "part").unhealthy
    made.rows["reward"][5, 3] = np.nan
    assert reading(not_finite, made, tmp_path / "reward").since == 5


@pytest.mark.parametrize("later, sick", [(0.25, False), (0.75, True)])
def test_what_exceeds_its_limit_for_a_while_is_not_a_finding(later, sick, tmp_path):
    """Six steps above the limit, at chance or not; what follows is said in the same sentence, so it counts."""
    made = healthy("grpo", steps=48)
    equal = np.zeros((48, 8), bool)
    equal[:, :2] = True
    equal[10:16, :6] = True
    equal[16:, : round(8 * later)] = True
    reward = made.rows["reward"].reshape(48, 8, 4)
    reward[equal] = 1.0
    found = reading(zero_variance_groups, made, tmp_path)
    assert found.unhealthy == sick and (found.seen > 0.5) == sick


@pytest.mark.parametrize("begins", [88, 96, 140])
def test_the_onset_of_what_a_window_shows_is_looked_for_in_the_whole_run(begins, tmp_path):
    """Equal responses have equal rewards, until scores are shuffled within each step."""
    made, chance = healthy(steps=160), np.random.default_rng(3)
    made.info, made.tokens = {}, {"mask": made.mask, "token_id": made.tokens["token_id"]}
    word = chance.integers(0, 4, made.rows["response"].shape)
    made.rows["response"] = np.array(["yes", "no", "perhaps", "never"], object)[word]
    made.rows["reward"] = word.astype(float)
    for step in range(begins, 160):
        made.rows["reward"][step] = chance.permutation(made.rows["reward"][step])
    (found,) = diagnose(made.data(tmp_path), [reward_is_noise]).findings
    assert found.reading.window is not None
    assert found.reading.since is not None and abs(found.reading.since - begins) <= 2
    assert found.reading.between is not None and found.reading.between[0] >= begins - 3


def moved(made: Made) -> np.ndarray:
    """Move the policy ten times as far from its reference, and return the log-ratios."""
    delta = np.where(made.mask, 10 * (made.tokens["logprob"] - made.tokens["ref_logprob"]), 0.0)
    made.tokens["ref_logprob"] = np.where(made.mask, made.tokens["logprob"] - delta, 0.0)
    return delta


def tell_apart(made: Made) -> None:
    """Add a unique word to each response, so that no two are equal."""
    for number, place in enumerate(np.ndindex(*made.rows["response"].shape)):
        made.rows["response"][place] = f"{made.rows['response'][place]} w{number}"


def rising(made: Made, size: float) -> None:
    """Alone in their groups, responses are rewarded by what no word tells; their mean rises."""
    chance, (steps, batch) = np.random.default_rng(2), made.rows["reward"].shape
    made.rows["group"] = np.arange(steps * batch).reshape(steps, batch)
    made.rows["reward"] = chance.normal(0, 1, (steps, batch)) + size * np.arange(steps)[:, None] / steps
    made.tokens["ref_logprob"] = np.where(made.mask, made.tokens["ref_logprob"] - 0.2, 0.0)


@pytest.mark.parametrize("size, sick", [(0.0, True), (0.6, False)])
def test_a_reward_that_rises_by_less_than_its_spread_rises(size, sick, tmp_path):
    made = healthy(steps=64)
    tell_apart(made)
    rising(made, size)
    assert reading(reward_is_noise, made, tmp_path).unhealthy == sick


@pytest.mark.parametrize("lost", [True, False])
def test_a_relation_that_is_lost_later_is_not_within_range(lost, tmp_path):
    made = healthy(steps=64)
    tell_apart(made)
    if lost:
        chance = np.random.default_rng(1)
        made.rows["reward"][32:] = chance.permutation(made.rows["reward"][32:].ravel()).reshape(32, -1)
    found = diagnose(made.data(tmp_path), [reward_is_noise])
    assert not found.findings
    assert [one.undecided for one in found.skipped] == ([True] if lost else [])


def phrase_spreads(made: Made, phrase: str, apart: bool) -> None:
    """A phrase spreads from a twentieth to two thirds, and earns more; or each of its words on its own."""
    chance, shape = np.random.default_rng(6), made.rows["response"].shape
    share = np.linspace(0.05, 0.67, shape[0])[:, None]
    words = phrase.split()
    has = np.repeat((chance.random(shape) < share)[None], len(words), 0)
    if apart:
        has = chance.random((len(words), *shape)) < share
    for place in np.ndindex(*shape):
        said = [word for word, there in zip(words, has[(slice(None), *place)], strict=True) if there]
        made.rows["response"][place] = " ".join([made.rows["response"][place], *said])
    made.rows["reward"] = made.rows["reward"] + has.mean(0)


@pytest.mark.parametrize("apart, sick", [(False, True), (True, False)])
def test_the_words_of_a_phrase_are_one_pattern(apart, sick, tmp_path):
    """Many words that are worth as much are what a reward asks for; those of one phrase are not many."""
    made = healthy(steps=48)
    phrase_spreads(made, "hope this helps you today friend", apart)
    found = reading(pattern_spreading, made, tmp_path)
    assert found.unhealthy == sick and (not sick or " " in str(found.words["pattern"]))


def with_parts(made: Made, **parts: np.ndarray) -> None:
    each = [
        dict(zip(parts, values, strict=True)) for values in zip(*(one.ravel() for one in parts.values()), strict=True)
    ]
    made.rows["reward_parts"] = np.array(each, object).reshape(made.rows["reward"].shape)


def test_numbers_that_a_trainer_logs_beside_the_reward_are_not_parts_of_it(tmp_path):
    made, chance = healthy("grpo"), np.random.default_rng(2)
    made.info = {"format": "verl"}
    made.rows.pop("shaped_reward")
    one, two = chance.normal(0, 1, (2, *made.rows["reward"].shape))
    made.rows["reward"] = one
    with_parts(made, acc=one, level=made.rows["group"].astype(float))
    assert not names(diagnose(made.data(tmp_path / "level"), [one_part_dominates]))
    with_parts(made, acc=one, words=two)
    assert not names(diagnose(made.data(tmp_path / "words"), [one_part_dominates]))
    made.rows["reward"] = one + 0.02 * two
    with_parts(made, acc=one, style=0.02 * two)
    assert names(diagnose(made.data(tmp_path / "parts"), [one_part_dominates])) == ["one-part-dominates"]


def test_what_training_uses_is_the_shaped_reward(tmp_path):
    made, chance = healthy("grpo"), np.random.default_rng(2)
    one, two = chance.normal(0, 1, (2, *made.rows["reward"].shape))
    made.rows["reward"] = one + 0.02 * two
    with_parts(made, one=one, two=two)
    made.rows["shaped_reward"] = one + two
    assert not reading(one_part_dominates, made, tmp_path).unhealthy


@pytest.mark.parametrize("siblings", [4, 32])
def test_equal_siblings_are_counted_alike_in_groups_of_any_size(siblings, tmp_path):
    """Each response has one equal sibling: a third of the pairs of four, and a thirtieth of those of 32."""
    made = healthy("grpo", siblings=siblings)
    improbable = np.where(made.mask, -5.0, 0.0)
    made.mask[..., :3] = True
    made.tokens["logprob"] = made.tokens["sampler_logprob"] = improbable
    half = siblings // 2
    for name, column in (*made.tokens.items(), ("response", made.rows["response"])):
        grouped = column.reshape(24, 32 // siblings, siblings, *column.shape[2:])
        grouped[:, :, half:] = grouped[:, :, :half]
        (made.rows if name == "response" else made.tokens)[name] = grouped.reshape(column.shape)
    found = reading(same_seed, made, tmp_path)
    assert found.unhealthy and found.seen > 0.95


def test_responses_that_fail_are_not_equal_responses(tmp_path):
    """Half is nothing but an end token, which the policy gives a probability of e^-13."""
    made = healthy("grpo")
    failed = np.arange(32) % 4 < 2
    made.mask[:, failed] = np.arange(made.mask.shape[-1]) == 0
    made.tokens["token_id"][:, failed] = END
    made.rows["response"][:, failed] = ""
    made.rows["finish_reason"][:, failed] = "eos"
    for name in ("logprob", "sampler_logprob"):
        made.tokens[name][:, failed] = np.where(made.mask[:, failed], -13.0, 0.0)
    assert names(diagnose(made.data(tmp_path), [same_seed, rollouts_fail])) == ["rollouts-fail"]


def test_responses_that_a_policy_ends_at_once_do_not_fail(tmp_path):
    made = healthy("grpo")
    short = np.arange(32) % 3 == 0
    made.mask[:, short] = np.arange(made.mask.shape[-1]) == 0
    made.rows["response"][:, short] = ""
    made.rows["finish_reason"][:, short] = "eos"
    for name in ("logprob", "sampler_logprob"):
        made.tokens[name][:, short] = np.where(made.mask[:, short], np.log(1 / 3), 0.0)
    assert not reading(rollouts_fail, made, tmp_path).unhealthy


def test_a_rare_verdict_is_not_an_outlier(tmp_path):
    made = healthy("grpo")
    made.rows["reward"] = np.ones(made.rows["reward"].shape)
    made.rows["reward"][::5, 3] = 0.0
    made.rows["shaped_reward"] = made.rows["reward"]
    assert reward_outliers.statistic(made.data(tmp_path)) is None


@pytest.mark.parametrize("known", [True, False])
def test_a_score_on_each_token_is_not_a_wrong_penalty(known, tmp_path):
    """The penalty is found beside it; what is wrong is the sum, which has the score once for each token."""
    made = healthy()
    delta = moved(made)
    made.tokens["token_reward"] = np.where(made.mask, made.rows["reward"][..., None] - 0.05 * delta, 0.0)
    if not known:
        made.info = {}
        made.rows.pop("kl_coef")
    data = made.data(tmp_path)
    assert data.rows["kl_coef"] == pytest.approx(0.05, rel=0.01)
    assert names(diagnose(data, [reward_position, penalty_wrong, reward_accounting])) == ["reward-accounting"]


def test_advantages_that_contain_another_estimate_than_the_settings_say(tmp_path):
    made = healthy("rloo")
    made.info["kl"] = {"place": "reward", "estimator": "k1"}
    delta = moved(made)
    for name, spent in (("k1", delta), ("k3", np.where(made.mask, np.expm1(-delta) + delta, 0.0))):
        total = (made.rows["reward"] - 0.05 * spent.sum(-1)).reshape(24, 8, 4)
        others = (total.sum(-1, keepdims=True) - total) / 3
        made.tokens["advantage"] = np.where(made.mask, (total - others).reshape(24, 32)[..., None], 0.0)
        made.tokens.pop("token_reward", None)
        found = names(diagnose(made.data(tmp_path / name), [penalty_wrong]))
        assert found == ([] if name == "k1" else ["penalty-wrong"])


def whitened_later(noise: float, offset: float) -> Made:
    """A run whose values and returns are on the scale of the whitened rewards, but whose token rewards are not.

    Args:
        noise: Of the critic, in standard deviations of the returns.
        offset: What it is off by everywhere.
    """
    made = healthy(steps=32)
    raw = made.tokens["token_reward"].copy()
    for step, inside in zip(made.tokens["token_reward"], made.mask, strict=True):
        step[inside] /= step[inside].std()
    scale = made.tokens["token_reward"]
    going = np.where(made.mask, np.cumsum(scale[..., ::-1], -1)[..., ::-1], 0.0)
    wrong = noise * np.random.default_rng(1).normal(size=going.shape) + offset
    value = np.where(made.mask, going + wrong * going.std(), 0.0)
    made.tokens |= {"return": going, "value": value, "token_reward": raw}
    # λ = 1: the return of a token is its reward + the return of the next one.
    made.info["config"]["ppo"] |= {"whiten_rewards": True, "lam": 1.0}
    return made


@pytest.mark.parametrize("settings", [True, False])
def test_whitened_rewards_that_are_recorded_as_before(settings, tmp_path):
    made = whitened_later(noise=0.3, offset=0.0)
    if not settings:
        made.info = {}
    data = made.data(tmp_path)
    assert data.setting("config.ppo.whiten_rewards") is True
    found = diagnose(data, [value_not_fitting, value_start, reward_position, penalty_wrong, reward_accounting])
    assert not names(found) and value_not_fitting in [rule for rule, _ in found.healthy]
    assert data.rows["kl_coef"] == pytest.approx(0.05, rel=0.01)


def test_values_that_only_rounding_tells_from_returns_do_not_tell_how_rewards_are_whitened(tmp_path):
    data = whitened_later(noise=0.0, offset=0.3).data(tmp_path)
    assert not np.isfinite(scales(data.sample)).any()
    assert not names(diagnose(data, [value_not_fitting, value_start, reward_accounting]))


def test_only_what_a_trainer_can_record_is_asked_for():
    nothing = frozenset[str]().__contains__
    assert recordable("rows.characters|rows.length", nothing) == "rows.length"
    assert recordable("rows.advantage", nothing) == "tokens.advantage"
    assert recordable("rows.advantage", {"tokens.advantage"}.__contains__) == ""
    assert recordable("steps.policy/approx_kl|steps.policy/estimated_kl", nothing) == "steps.policy/approx_kl"
    assert needs(["tokens.a", "tokens.a|tokens.b", "tokens.c|tokens.d"]) == "tokens.a, tokens.c or tokens.d"


def test_the_same_import_again_is_not_advice():
    found = recipes({"format": "prime-rl"}, ["rows.reward", "tokens.ref_logprob"])
    assert [one.columns for one in found] == [("tokens.ref_logprob",)]


def test_a_run_whose_responses_have_one_advantage_has_no_critic(tmp_path):
    made = healthy("rloo")
    made.info = {}
    for name in ("value", "return", "token_reward"):
        made.tokens.pop(name)
    made.tokens["advantage"] = np.where(made.mask, made.rows["reward"][..., None], 0.0)
    reasons = {one.rule: str(one.reason) for one in diagnose(made.data(tmp_path), RULES).skipped}
    assert reasons["value-not-fitting"].startswith("applies to algorithms with a critic; here")


@pytest.mark.parametrize(
    "kinds, first, filtered, sick",
    [(400, 0.83, False, True), (400, 0.9, False, False), (20, 0.83, False, False), (400, 0.83, True, False)],
)
def test_nearly_uniform_choices_are_noise_if_training_has_led_there(kinds, first, filtered, sick, tmp_path):
    """A policy without training begins so, and a choice among few labels may be uniform; filtered tokens are few."""
    made, chance = healthy(), np.random.default_rng(0)
    made.tokens["token_id"] = np.where(made.mask, chance.integers(1, kinds, made.mask.shape), END)
    share = np.where(np.arange(len(made.mask)) < 3, first, 0.9)[:, None, None]
    made.tokens["entropy"] = np.where(made.mask, share * np.log(kinds), 0.0)
    made.tokens["logprob"] = -made.tokens["entropy"] * (0.5 if filtered else 1.0)
    made.metrics.pop("policy/entropy")
    found = reading(entropy_explosion, made, tmp_path)
    assert found.unhealthy == sick and (not sick or 0 < found.since <= 5)


def test_a_logged_kl_that_fits_until_the_middle(tmp_path):
    made = healthy()
    moved(made)
    delta = np.where(made.mask, made.tokens["logprob"] - made.tokens["ref_logprob"], 0.0)
    made.metrics["kl/objective"] = delta.sum(-1).mean(-1)
    made.metrics["kl/objective"][HALF:] += 5.0
    (found,) = diagnose(made.data(tmp_path), [unknown_estimate]).findings
    assert found.reading.since == HALF
