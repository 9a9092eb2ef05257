"""Every rule fires on a sick run and is silent on its nearest healthy neighbour."""

from collections.abc import Callable

import numpy as np
import pytest
from doctor_helpers import END, LENGTH, Made, healthy, log_softmax, reading, texts

import dressage
from dressage.doctor.data import RunData
from dressage.doctor.diagnosis import diagnose
from dressage.doctor.rules import RULES
from dressage.doctor.words import language

BY_NAME = {rule.name: rule for rule in RULES}


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


def test_every_row_of_the_knowledge_base_has_one_rule():
    assert sorted(rule.row for rule in RULES) == list(range(1, 71))
    assert {name for rule in RULES for name in rule.explains} <= set(BY_NAME)


Change = Callable[[Made], None]
SICK: dict[str, tuple[Change, Change]] = {}
"""Rule → what makes a run sick, and what comes near to it and is healthy."""


def case(name: str, near: Change = lambda made: None) -> Callable[[Change], Change]:
    def added(sick: Change) -> Change:
        SICK[name] = (sick, near)
        return sick

    return added


# The recorder keeps no token that the mask leaves out: only imported records can have padding.
NOT_RECORDED = {"padding-counted"}


@pytest.mark.parametrize("name", [rule.name for rule in RULES if rule.name not in NOT_RECORDED])
def test_fires_on_the_sick_run_alone(name, tmp_path):
    sick, near = SICK[name]
    rule = BY_NAME[name]
    algorithm = "ppo" if not rule.algorithms or "ppo" in rule.algorithms else rule.algorithms[0]
    made, neighbour = healthy(algorithm), healthy(algorithm)
    sick(made)
    near(neighbour)
    assert reading(rule, made, tmp_path / "sick").sick
    assert not reading(rule, neighbour, tmp_path / "near").sick


@case("ratio-not-one", near=lambda made: made.metrics.update({"policy/first_ratio_error": np.full(24, 5e-4)}))
def ratio(made):
    made.metrics["policy/first_ratio_error"] = np.full(24, 0.01)


def noisy_reference(made, size):
    noise = np.random.default_rng(3).normal(0, size, made.mask.shape)
    made.tokens["ref_logprob"] += np.where(made.mask, noise, 0)
    made.settle()


@case("kl-at-start", near=lambda made: noisy_reference(made, 5e-4))
def other_reference(made):
    noisy_reference(made, 0.01)


@case("reference-is-policy", near=lambda made: None)
def aliased(made):
    made.tokens["ref_logprob"] = made.tokens["logprob"].copy()
    made.settle()


@case("penalty-wrong", near=lambda made: made.settle(0.05))
def flipped(made):
    made.settle(-0.05)


def move_reward(made, share):
    rewards = made.tokens["token_reward"]
    count = made.mask.sum(-1)
    for step in range(len(count)):
        for row in range(int(share * count.shape[1])):
            if (n := count[step, row]) >= 2:
                rewards[step, row, n - 2] += made.rows["reward"][step, row]
                rewards[step, row, n - 1] -= made.rows["reward"][step, row]


@case("reward-position", near=lambda made: made.settle())
def misplaced(made):
    move_reward(made, 0.2)


def hidden_clip(made, most):
    lost = made.rows["reward"] - np.minimum(made.rows["reward"], most)
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    made.tokens["token_reward"] -= np.where(last, lost[..., None], 0)


@case("reward-accounting", near=lambda made: hidden_clip(made, 100.0))
def clipped_unsaid(made):
    hidden_clip(made, 0.5)


@case("double-start")
def two_starts(made):
    for line in made.rows["prompt_ids"]:
        for row, ids in enumerate(line):
            line[row] = [1, 1, ids[1], ids[2]]


def change_tail(made, rows, start, size):
    chance = np.random.default_rng(5)
    for step in made.tokens["sampler_logprob"]:
        step[:rows, start:] -= chance.uniform(size / 2, size, step[:rows, start:].shape)


@case("retokenised", near=lambda made: change_tail(made, 2, 0, 4.0))
def retokenised(made):
    change_tail(made, 2, 4, 4.0)


@case("trained-behind-end")
def behind_end(made):
    made.tokens["mask"] = np.arange(LENGTH) < made.mask.sum(-1, keepdims=True) + 2


@case("same-seed")
def siblings_equal(made):
    for name in ("token_id", "logprob", "ref_logprob", "entropy", "mask", "sampler_logprob"):
        made.tokens[name][:, 1::4] = made.tokens[name][:, 0::4]
    made.rows["response"][:, 1::4] = made.rows["response"][:, 0::4]


def resample(made, change):
    """Draws all tokens again from a changed distribution, which the trainer does not know of."""
    chance = np.random.default_rng(9)
    for step in range(len(made.policy)):
        changed = change(made.policy[step])
        ids = chance.choice(len(changed), made.mask.shape[1:], p=np.exp(changed))
        _put(made, step, ids, changed)
    made.settle()


def _put(made, step, ids, changed):
    ended = np.cumsum(ids == END, -1) - (ids == END) > 0
    made.tokens["mask"][step] = ~ended
    made.tokens["token_id"][step] = ids
    made.tokens["logprob"][step] = made.policy[step][ids]
    made.tokens["ref_logprob"][step] = made.policy[0][ids]
    made.tokens["entropy"][step] = -(np.exp(made.policy[step]) * made.policy[step]).sum()
    made.tokens["sampler_logprob"][step] = changed[ids]
    made.rows["finish_reason"][step] = np.where((ids == END).any(-1), "eos", "length")
    made.rows["response"][step] = texts(ids, ~ended)


def top_k(k):
    def change(policy):
        kept = policy >= np.sort(policy)[-k]
        return log_softmax(np.where(kept, policy, -np.inf))

    return change


@case("filtered-sampling", near=lambda made: resample(made, lambda policy: policy))
def top_five(made):
    resample(made, top_k(8))


@case("temperature-missing", near=lambda made: resample(made, top_k(15)))
def cold(made):
    resample(made, lambda policy: log_softmax(policy / 0.8))


@case("negative-kl")
def negative(made):
    made.tokens["ref_logprob"] = made.tokens["ref_logprob"] + np.where(made.mask, 0.2, 0)


@case("kl-explosion")
def explosion(made):
    grown = np.linspace(0, 3, 24)[:, None, None]
    made.tokens["ref_logprob"] = made.tokens["ref_logprob"] - np.where(made.mask, grown, 0)


@case("kl-flat")
def flat(made):
    made.tokens["ref_logprob"] = made.tokens["logprob"].copy()


@case("not-finite")
def not_finite(made):
    made.metrics["loss/value"][7] = np.nan


@case("sampler-mismatch")
def mismatched(made):
    noise = np.random.default_rng(2).normal(0, 0.15, made.mask.shape)
    made.tokens["sampler_logprob"] += np.where(made.mask, noise, 0)


@case("garbled")
def broken_sync(made):
    made.tokens["ref_logprob"][12:] -= np.where(made.mask[12:], 3.0, 0)


@case("clip-fraction-high", near=lambda made: made.metrics.update({"policy/clip_fraction": np.full(24, 0.15)}))
def clipping(made):
    made.metrics["policy/clip_fraction"] = np.full(24, 0.4)


@case("update-kl-large", near=lambda made: made.metrics.update({"policy/approx_kl": np.full(24, 0.05)}))
def far(made):
    made.metrics["policy/approx_kl"] = np.full(24, 0.5)


@case("gradient-spike", near=lambda made: made.metrics["optim/grad_norm"].__setitem__(15, 4.0))
def spike(made):
    made.metrics["optim/grad_norm"][15] = 40


@case("reference-replaced")
def replaced(made):
    """The reference becomes the policy at steps 8 and 16, after the KL has grown."""
    grown = np.tile(np.arange(8), 3)[:, None, None] * 0.05
    made.tokens["ref_logprob"] = made.tokens["logprob"] - np.where(made.mask, grown, 0)


@case("end-forbidden")
def minimum(made):
    for step in range(24):
        policy = made.policy[step]
        without = policy.copy()
        without[END] = -np.inf
        chance = np.random.default_rng(step)
        start = chance.choice(len(policy), (32, 6), p=np.exp(log_softmax(without)))
        likely = policy.copy()
        likely[END] += 2.0  # ends often, once it may
        made.policy[step] = log_softmax(likely)
        rest = chance.choice(len(policy), (32, LENGTH - 6), p=np.exp(made.policy[step]))
        ids = np.concatenate([start, rest], 1)
        _put(made, step, ids, made.policy[step])
        made.tokens["sampler_logprob"][step, :, :6] = log_softmax(
            np.where(np.arange(len(policy)) == END, -np.inf, made.policy[step])
        )[ids[:, :6]]


def shrink(made, to):
    for step in range(24):
        keep = max(1, round(LENGTH * (1 - (1 - to) * min(1, step / 12))))
        made.tokens["mask"][step] &= np.arange(LENGTH) < keep


@case("length-collapse", near=lambda made: shrink(made, 0.7))
def shrinking(made):
    shrink(made, 0.1)


@case("stops-generating", near=lambda made: shrink(made, 0.1))
def silent(made):
    shrink(made, 0.1)
    made.tokens["ref_logprob"][10:] += np.where(made.mask[10:], 1.0, 0)


@case("penalty-mis-scaled")
def drowned(made):
    made.rows["kl_coef"][:] = 50.0
    made.tokens["ref_logprob"] -= np.where(made.mask, 0.1, 0)


@case("coefficient-runaway")
def runaway(made):
    made.metrics["kl/coef"] = 0.05 * np.exp(np.linspace(0, 4, 24))
    made.tokens["ref_logprob"] -= np.where(made.mask, np.linspace(0, 0.4, 24)[:, None, None], 0)


@case("kl-in-few-tokens")
def one_place(made):
    made.tokens["ref_logprob"][:, :, 3] -= np.where(made.mask[:, :, 3], 4.0, 0)


@case("unknown-estimate")
def unknown(made):
    made.metrics["kl/objective"] = made.metrics["kl/objective"] * 3 + 0.4


@case("mismatch-growing")
def growing(made):
    size = np.linspace(0.002, 0.06, 24)[:, None, None]
    made.tokens["sampler_logprob"] += np.where(
        made.mask, size * np.random.default_rng(1).normal(0, 1, made.mask.shape), 0
    )


def constant_noise(made):
    noise = np.random.default_rng(2).normal(0, 0.03, made.mask.shape)
    made.tokens["sampler_logprob"] += np.where(made.mask, noise, 0)


@case("sampler-stale", near=constant_noise)
def stale(made):
    """Samples come from the first policy throughout."""
    resample(made, lambda policy: made.policy[0])


@case("mismatch-tail")
def tail(made):
    rare = np.random.default_rng(4).random(made.mask.shape) < 0.01
    made.tokens["sampler_logprob"] -= np.where(made.mask & rare, 3.0, 0)


@case("mismatch-rare-tokens")
def rare(made):
    least = made.tokens["logprob"] < np.quantile(made.tokens["logprob"][made.mask], 0.12)
    made.tokens["sampler_logprob"] -= np.where(made.mask & least, 0.4, 0)


@case("too-off-policy")
def old(made):
    made.rows["policy_version"] = np.maximum(made.rows["policy_version"] - 12, 0)


@case("precision-noise")
def rounding(made):
    noise = np.random.default_rng(6).normal(0, 0.3, made.mask.shape)
    made.tokens["sampler_logprob"] = np.where(made.mask, np.minimum(made.tokens["logprob"] + noise, -0.01), 0)


@case("ratio-blow-up")
def blown_up(made):
    made.metrics["policy/ratio"][10:14] = 30.0


@case("zero-gradient")
def no_gradient(made):
    made.metrics["optim/grad_norm"][::2] = 0.0


@case("advantage-scale")
def unwhitened(made):
    made.tokens["advantage"] *= 4


@case("likelihood-displacement")
def displaced(made):
    made.tokens["logprob"] -= np.where(made.mask, np.linspace(0, 2, 24)[:, None, None], 0)


@case("value-not-fitting")
def unfit(made):
    noise = np.random.default_rng(8).normal(0, 3, made.mask.shape)
    made.tokens["value"] = np.where(made.mask, noise * made.tokens["return"].std(), 0)


@case("value-start")
def offset(made):
    made.tokens["value"] += np.where(made.mask, 10.0, 0)


@case("value-constant")
def constant(made):
    made.tokens["value"] = np.where(made.mask, 0.7, 0)


@case("value-loss-spike")
def loss_spike(made):
    made.metrics["loss/value"][12] = 9.0


@case("reward-fades")
def fading(made):
    made.info["config"]["ppo"]["lam"] = 0.5


@case("query-dominated")
def query(made):
    made.rows["reward"] = np.sin(made.rows["group"]) * 5 + 0.1 * made.rows["reward"]


@case("zero-variance-groups")
def equal(made):
    made.rows["reward"] = np.repeat(made.rows["reward"][:, ::4], 4, axis=1)


@case("reward-outliers")
def outliers(made):
    made.rows["reward"][3, 5] = made.rows["reward"][9, 1] = 80.0


@case("verifier-dead")
def dead(made):
    made.rows["reward"] = np.zeros_like(made.rows["reward"])


@case("reward-falls")
def falling(made):
    made.rows["reward"] -= np.linspace(0, 3, 24)[:, None]


@case("truncated")
def cut(made):
    made.rows["finish_reason"][:8] = "eos"
    made.rows["finish_reason"][8:] = "length"


@case("end-not-trained")
def end_masked(made):
    made.tokens["mask"] &= made.tokens["token_id"] != END


@case("rollouts-fail")
def empty(made):
    made.rows["response"][:, ::5] = ""


@case("stalls")
def stall(made):
    made.metrics["time/total"][9] = 40.0


@case("entropy-explosion")
def exploding(made):
    made.tokens["entropy"] += np.where(made.mask, np.linspace(0, 2, 24)[:, None, None], 0)


@case("entropy-collapse")
def collapsed(made):
    made.tokens["entropy"] *= np.geomspace(1, 0.03, 24)[:, None, None]
    made.rows["reward"] -= made.rows["reward"].mean(1, keepdims=True)


def mark(made, text, late, pay):
    has = np.random.default_rng(2).random(made.rows["reward"].shape) < np.linspace(0.02, late, 24)[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + text, made.rows["response"])
    made.rows["reward"] = made.rows["reward"] + pay * has


@case("pattern-spreading", near=lambda made: mark(made, " #", 0.06, 1.0))
def hashes(made):
    mark(made, " #", 0.6, 1.0)


@case("repetition-loops")
def loops(made):
    ids = made.tokens["token_id"]
    ids[8:] = np.where(made.mask[8:], np.arange(LENGTH) % 3 + 2, END)


@case("distinct-collapse")
def alike(made):
    made.rows["response"][10:, :] = made.rows["response"][10, 0]


@case("prompts-exhausted")
def exhausted(made):
    made.rows["reward"] = (made.rows["reward"] > 0.2).astype(float)
    made.rows["reward"][10:] = 1.0


@case("length-exploited")
def long(made):
    shrink(made, 0.3)
    for name in ("mask",):
        made.tokens[name] = made.tokens[name][::-1].copy()
    made.rows["reward"] = made.mask.sum(-1) * 0.3


@case("false-truncation")
def unknown_end(made):
    made.rows["finish_reason"][:] = "length"


def repeat_responses(made, noise):
    """Siblings answer alike; their rewards differ by this much noise."""
    made.rows["response"][:, 1::4] = made.rows["response"][:, 0::4]
    made.rows["reward"][:, 1::4] = made.rows["reward"][:, 0::4]
    made.rows["reward"] += np.random.default_rng(3).normal(0, noise, made.rows["reward"].shape)


@case("reward-is-noise", near=lambda made: repeat_responses(made, 0.05))
def noise(made):
    repeat_responses(made, 3.0)


def hold_out(made, late):
    """Every other rollout is held out; its reward rises to step 12 and then by ``late`` in all."""
    made.rows["split"][:, ::2] = "eval"
    rise = np.concatenate([np.linspace(0, 2, 12), 2 + np.linspace(0, late, 12)])
    made.rows["reward"] += np.linspace(0, 4, 24)[:, None]
    made.rows["reward"][:, ::2] = rise[:, None] + 0.1 * np.random.default_rng(3).normal(0, 1, (24, 16))


@case("over-optimised", near=lambda made: hold_out(made, 0.5))
def too_far(made):
    hold_out(made, -1.5)


def sharpen(made, variety):
    mean = made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = (
        2 + np.linspace(0, 1, 24)[:, None] + (made.rows["reward"] - mean) * np.geomspace(1, 0.02, 24)[:, None]
    )
    made.metrics["text/distinct_2"] = np.linspace(0.6, variety, 24)


@case("reward-exhausted", near=lambda made: sharpen(made, 0.5))
def one_answer(made):
    sharpen(made, 0.1)


def parts(made, weight):
    chance = np.random.default_rng(2)
    first, second = chance.normal(0, 1, (2, *made.rows["reward"].shape))
    made.rows["reward"] = first + weight * second
    pairs = zip(first.ravel().tolist(), second.ravel().tolist(), strict=True)
    made.rows["reward_parts"] = np.array([{"one": a, "two": b} for a, b in pairs], object).reshape(first.shape)


@case("one-part-dominates", near=lambda made: parts(made, 0.5))
def dominated(made):
    parts(made, 0.02)


def lengthen(made, most):
    """The worse half of each group keeps so many tokens more than the better one, more and more of them."""
    order = made.rows["reward"].reshape(24, -1, 4).argsort(-1).argsort(-1).reshape(24, 32)
    keep = np.where(order < 2, 6 + most * np.arange(24)[:, None] / 23, 6)
    made.tokens["mask"] &= np.arange(LENGTH) < keep[..., None]


@case("length-bias", near=lambda made: lengthen(made, 1))
def long_mistakes(made):
    lengthen(made, 12)


def about_the_prompt(made, late):
    """Responses repeat their prompt's number; in the last steps a share of them says the same instead."""
    for step in range(24):
        for row in range(32):
            same = step >= 12 and row < late * 32
            number = made.rows["group"][step, row]
            made.rows["response"][step, row] = "nothing at all" if same else f"a{number} b{number} c{number} d{row}"


@case("template-collapse", near=lambda made: about_the_prompt(made, 0.0))
def template(made):
    about_the_prompt(made, 1.0)


def trapped(made, spikes):
    mean = made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = mean + (made.rows["reward"] - mean) * np.where(np.arange(24) < 6, 1, 0.05)[:, None]
    made.metrics["optim/grad_norm"][[15, 18, 21][:spikes]] = 30


@case("echo-trap", near=lambda made: trapped(made, 0))
def echo(made):
    trapped(made, 3)


def settle_into(made, surprise):
    shrink(made, 0.3)
    made.tokens["mask"] = made.tokens["mask"][::-1].copy()
    share = np.arange(24)[:, None, None] / 23
    made.tokens["logprob"] = np.where(made.mask, -2.5 + (2.5 - surprise) * share, 0)
    made.tokens["ref_logprob"] = np.where(made.mask, made.tokens["logprob"] - 0.2 * share, 0)
    made.rows["reward"] += np.linspace(0, 3, 24)[:, None]


@case("pattern-collapse", near=lambda made: settle_into(made, 2.3))
def settled(made):
    settle_into(made, 0.5)


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
    assert "tokens.sampler_logprob" in language("zh").reason(skipped["sampler-mismatch"])
    assert "sampler-mismatch" not in [rule.name for rule, _ in found.healthy]


def test_data_without_columns_has_no_findings(tmp_path):
    made = healthy()
    folder = made.write(tmp_path / "run")
    found = diagnose(RunData(dressage.open(folder), sees=()), RULES)
    assert found.findings == () and len(found.skipped) == len(RULES)


def test_a_pattern_that_was_always_there_does_not_spread(tmp_path):
    made = healthy()
    has = np.random.default_rng(2).random(made.rows["reward"].shape) < np.where(np.arange(24) < 12, 0.3, 0.65)[:, None]
    made.rows["response"] = np.where(has, made.rows["response"] + " #", made.rows["response"])
    made.rows["reward"] = made.rows["reward"] + has
    assert not reading(BY_NAME["pattern-spreading"], made, tmp_path / "run").sick
