"""What trainers of other people record: facts that veto an inference, and what return, value and order determine."""

import numpy as np
import pytest
from doctor_helpers import healthy, reading

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.groups import equal_by_chance, groups
from cavesson.doctor.rules.group_advantages import group_advantages
from cavesson.doctor.rules.invariants import same_seed
from cavesson.doctor.rules.mismatch import mismatch_tail, sampled_ahead, sampler_mismatch
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.reward import zero_variance_groups
from cavesson.doctor.rules.sampling import filtered_sampling
from cavesson.doctor.rules.system import rollouts_fail
from cavesson.doctor.rules.update import advantage_scale, advantage_sign
from cavesson.doctor.rules.value import value_not_fitting, value_start
from cavesson.doctor.rules.verifier import verifier_dead


def test_a_recorder_alone_does_not_make_a_run_ours(tmp_path):
    with cavesson.Recorder(tmp_path) as recorder:
        recorder.rollouts(0, {"prompt": ["a"], "response": ["b"], "reward": [1.0]})
    assert not RunData(cavesson.open(tmp_path)).own
    made = healthy()
    made.info["cavesson"] = "1"
    assert made.data(tmp_path / "own").own


def test_returns_in_place_of_advantages(tmp_path):
    made = healthy()
    made.tokens["advantage"] = made.tokens["return"].copy()
    found = reading(advantage_sign, made, tmp_path / "returns")
    assert found.unhealthy
    assert "the return itself" in str(found.words["how"])
    assert not reading(advantage_sign, healthy(), tmp_path / "healthy").unhealthy


def test_advantages_of_other_responses(tmp_path):
    made = healthy()
    made.tokens["advantage"] = made.tokens["advantage"][:, ::-1].copy()
    found = reading(advantage_sign, made, tmp_path)
    assert found.unhealthy
    assert "another order" in str(found.words["how"])


@pytest.mark.parametrize("padded", [False, True])
def test_whitening_over_padding(padded, tmp_path):
    """With as many padding tokens as trained ones, the deviation of the trained ones is √2 times too large."""
    made = healthy()
    mask = made.mask
    for step in range(len(mask)):
        gap = np.where(mask[step], made.tokens["return"][step] - made.tokens["value"][step], 0.0)
        gap = np.concatenate([gap, np.zeros_like(gap)], 1)
        over = gap if padded else gap[:, : mask.shape[-1]][mask[step]]
        made.tokens["advantage"][step] = ((gap - over.mean()) / over.std())[:, : mask.shape[-1]]
    found = reading(advantage_scale, made, tmp_path)
    assert found.unhealthy == padded
    assert ("padding" in str(found.words["how"])) == padded


def test_groups_of_neighbours_where_prompts_are_tiled(tmp_path):
    """Prompts 0 to 7 come four times over, and the code compares the first four responses, the next four, …"""
    made = healthy("grpo")
    made.info["kl"]["place"] = "loss"
    reward = made.rows["reward"]
    blocks = reward.reshape(24, 8, 4)
    advantage = (blocks - blocks.mean(-1, keepdims=True)) / (blocks.std(-1, keepdims=True) + 1e-12)
    made.tokens["advantage"] = np.where(made.mask, advantage.reshape(24, 32, 1), 0)
    assert not reading(group_advantages, made, tmp_path / "blocks").unhealthy
    made.rows["group"] = np.tile(np.arange(8), (24, 4)) + 100 * np.arange(24)[:, None]
    made.rows["prompt"] = [[f"question {group % 100}" for group in step] for step in made.rows["group"]]
    found = reading(group_advantages, made, tmp_path / "tiled")
    assert found.unhealthy
    assert "interleaved" in str(found.words["how"])


def test_equal_by_chance_by_hand(tmp_path):
    """Two of eight rewards are 1: pairs are equal with the probability ¼² + ¾² = 0.625."""
    with cavesson.Recorder(tmp_path) as recorder:
        rows = {"prompt": [*"aabbccdd"], "response": [*"stuvwxyz"], "reward": [1.0, 1, 0, 0, 0, 0, 0, 0]}
        recorder.rollouts(0, rows)
    data = RunData(cavesson.open(tmp_path))
    found = groups(data.rows, data.rows["reward"])
    assert equal_by_chance(data.rows, data.rows["reward"], found).tolist() == [0.625] * 4


@pytest.mark.parametrize("by_prompt", [False, True])
def test_pairs_of_rare_successes_are_not_prompts_of_the_wrong_difficulty(by_prompt, tmp_path):
    """A quarter of the rewards is 1: wherever chance puts it, or for a quarter of the prompts."""
    made = healthy("grpo", siblings=2)
    chance = np.random.default_rng(0)
    success = chance.permuted(np.tile(np.arange(32) < 8, (24, 1)), axis=1)
    made.rows["reward"] = (np.tile(np.arange(32) < 8, (24, 1)) if by_prompt else success).astype(float)
    assert reading(zero_variance_groups, made, tmp_path).unhealthy == by_prompt


@pytest.mark.parametrize("at_once", [False, True])
def test_passes_that_become_fewer_are_lost_by_the_policy(at_once, tmp_path):
    made, chance = healthy(), np.random.default_rng(0)
    passes = np.full(24, 0.6) if at_once else np.linspace(0.6, 0.02, 24)
    passes[12:] = 0.0
    if not at_once:
        passes[:12] = np.linspace(0.6, 0.1, 12)
    made.rows["reward"] = (chance.random((24, 32)) < passes[:, None]).astype(float)
    assert reading(verifier_dead, made, tmp_path).unhealthy == at_once


@pytest.mark.parametrize(
    ("passes", "dead"),
    [
        ([0.6, 0.02], True),  # at once
        ([0.6, 0.4, 0.2, 0.2, 0.1, 0.1, 0.02], False),  # within a few steps
        ([0.9] * 4 + [0.2] * 3 + [0.02], False),  # most at one step, and then the rest
        ([0.1, 0.2, 0.5, 0.8, 0.9, 0.9, 0.0], True),  # the policy had learned until the verifier failed
        ([0.02], True),  # from the start
    ],
)
@pytest.mark.parametrize("steps", [24, 96])
def test_a_verifier_fails_at_once(passes, dead, steps, tmp_path):
    """In the longer run, more than 95 % of all responses fail."""
    made, chance = healthy(steps=steps), np.random.default_rng(0)
    share = np.full(steps, passes[-1])
    share[: len(passes)] = passes
    made.rows["reward"] = (chance.random((steps, 32)) < share[:, None]).astype(float)
    assert reading(verifier_dead, made, tmp_path).unhealthy == dead


@pytest.mark.parametrize("stays", [3, 24])
def test_a_critic_that_starts_far_away_is_a_note_unless_something_follows(stays, tmp_path):
    """A critic that never comes near does not fit its returns either."""
    made = healthy()
    made.tokens["value"][:stays] += np.where(made.mask[:stays], 10.0, 0)
    (found,) = diagnose(made.data(tmp_path), [value_start, value_not_fitting]).causes
    assert (found.rule.name, found.severity) == ("value-start", "note" if stays == 3 else "warning")


@pytest.mark.parametrize(("off", "severity"), [(0.7, "note"), (2.0, "warning")])
def test_a_critic_that_starts_far_away_and_lags_after_that_is_a_note(off, severity, tmp_path):
    """After four steps it gives the mean of the returns, less a part of their spread: a note explains a note."""
    made = healthy()
    for step, inside in enumerate(made.mask):
        goal = made.tokens["return"][step][inside]
        away = 3 * goal.std() if step < 4 else -off * goal.std()
        made.tokens["value"][step][inside] = goal.mean() + away
    (found,) = diagnose(made.data(tmp_path), [value_start, value_not_fitting]).causes
    assert (found.rule.name, found.severity) == ("value-start", severity)


@pytest.mark.parametrize("steps", [1, 24])
def test_a_critic_that_one_step_brings_near_has_misled_nobody(steps, tmp_path):
    made = healthy()
    made.tokens["value"][:steps] += np.where(made.mask[:steps], 10.0, 0)
    assert reading(value_start, made, tmp_path).unhealthy == (steps > 1)


def test_a_critic_that_its_first_updates_throw_off(tmp_path):
    """From the second step to the fifth, it is ten standard deviations away, long before its warm-up has ended."""
    made = healthy()
    far = np.where(made.mask[1:5], 10 * made.tokens["return"][made.mask].std(), 0.0)
    made.tokens["value"][1:5] += far
    found = reading(value_not_fitting, made, tmp_path)
    assert found.unhealthy
    assert found.since == 1


def test_an_outlier_does_not_make_a_reward_noise(tmp_path):
    """Equal responses get equal rewards; one reward in a hundred is a thousand times as large."""
    made, chance = healthy(), np.random.default_rng(0)
    words = chance.integers(0, 5, (24, 32))
    made.rows["response"] = [[f"word {word}" for word in step] for step in words]
    made.rows["prompt"] = [["question"] * 8 + [f"question {i % 4}" for i in range(24)] for _ in range(24)]
    made.rows["group"] = np.arange(24 * 32).reshape(24, 32)
    reward = words.astype(float)
    reward.flat[::97] = 1000.0
    made.rows["reward"] = reward
    assert not reading(reward_is_noise, made, tmp_path).unhealthy


def test_tokens_that_surprise_the_trainer_were_not_kept_by_a_filter(tmp_path):
    """Scores of the wrong token: the sampler gives every token more, as with a filter, but they surprise."""
    made = healthy()
    made.tokens["logprob"] -= np.where(made.mask, 5.0, 0)
    assert not reading(filtered_sampling, made, tmp_path / "filter").unhealthy
    assert reading(sampler_mismatch, made, tmp_path / "mismatch").unhealthy


@pytest.mark.parametrize("shared", [False, True])
def test_wrong_scores_do_not_make_equal_responses_improbable(shared, tmp_path):
    """Siblings are equal at any two places alike, or at the first two always, whatever the trainer makes of them."""
    made, chance = healthy("grpo"), np.random.default_rng(0)
    made.tokens["logprob"] -= np.where(made.mask, 5.0, 0)
    made.tokens.pop("sampler_logprob", None)
    words = chance.integers(0, 4, (24, 8, 4))
    if shared:
        words[:, :, 1] = words[:, :, 0]
    made.rows["response"] = [[f"word {word}" for word in step] for step in words.reshape(24, 32)]
    assert reading(same_seed, made, tmp_path).unhealthy == shared


@pytest.mark.parametrize("told", [False, True])
def test_a_sampler_that_is_renewed_every_second_step_and_says_so(told, tmp_path):
    """At every second step, sampler and trainer differ by what the policy has moved; versions tell, or do not."""
    made, chance = healthy(), np.random.default_rng(0)
    moved = np.where(np.arange(24) % 2 == 1, 0.3, 0.0)[:, None, None] * chance.normal(0, 1, made.mask.shape)
    made.tokens["sampler_logprob"] = made.tokens["logprob"] + np.where(made.mask, moved, 0)
    version = np.arange(24) - (np.arange(24) % 2 if told else 0)
    made.rows["policy_version"] = np.repeat(version[:, None], 32, 1)
    assert sampled_ahead(made.data(tmp_path)) == told


@pytest.mark.parametrize(("spread", "apart", "share"), [(1.6, False, 0.014), (1.6, True, 0.014), (2.5, False, 0.080)])
def test_the_largest_of_differences_of_all_sizes_are_no_tail(spread, apart, share, tmp_path):
    """|δ| is 0.03·e^(1.6·z): above 1 nat for z > 2.19, 1.4 % of the tokens, and above 0.25 for z > 1.33, 9.3 %.

    With 2.5 instead of 1.6, these are z > 1.40, 8.0 %, and z > 0.85, 19.8 %.
    """
    made, chance = healthy(), np.random.default_rng(0)
    size = 0.03 * np.exp(spread * chance.normal(size=made.mask.shape))
    if apart:
        size = np.where(size > 1, size, 0.0)
    made.tokens["sampler_logprob"] = made.tokens["logprob"] - np.where(made.mask, size, 0.0)
    found = reading(mismatch_tail, made, tmp_path)
    assert found.unhealthy == apart and found.seen == pytest.approx(share, rel=0.2)


@pytest.mark.parametrize("others", ["as before", "worse", "nothing"])
def test_empty_responses_of_a_policy_that_fails_are_no_failed_requests(others, tmp_path):
    made = healthy()
    for name in ("finish_reason", "length"):
        made.rows.pop(name, None)
    for name in ("token_id", "logprob", "ref_logprob", "sampler_logprob", "entropy"):
        made.tokens.pop(name, None)
    made.rows["response"] = made.rows["response"].copy()
    made.rows["response"][12:, ::5] = ""
    if others == "worse":
        made.rows["reward"] = made.rows["reward"].copy()
        made.rows["reward"][12:] -= 5 * made.rows["reward"].std()
    if others == "nothing":
        made.rows["reward"] = np.zeros_like(made.rows["reward"])
    found = reading(rollouts_fail, made, tmp_path)
    assert found.unhealthy == (others == "as before")
    assert (found.undecided is not None) == (others == "nothing")


@pytest.mark.parametrize("rises", [False, True])
def test_rare_passes_that_become_more_are_those_of_a_policy_that_learns(rises, tmp_path):
    made, chance = healthy(batch=64), np.random.default_rng(0)
    share = np.linspace(0, 0.08, 24) if rises else np.full(24, 0.03)
    made.rows["reward"] = (chance.random((24, 64)) < share[:, None]).astype(float)
    assert reading(verifier_dead, made, tmp_path).unhealthy != rises


@pytest.mark.parametrize("dies", [False, True])
def test_a_verifier_that_has_never_passed_anything_may_be_right(dies, tmp_path):
    made = healthy()
    made.rows["reward"] = np.where((np.arange(24) < 12)[:, None] & dies, np.arange(32) % 2, 0.0)
    found = diagnose(made.data(tmp_path), [verifier_dead]).findings[0]
    assert found.severity == ("error" if dies else "warning")
