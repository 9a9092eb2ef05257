"""Healthy runs of kinds that small benchmarks lack, which chance, prompts, forms or settings make look faulty."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from doctor_helpers import healthy, reading

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.rules.diversity import distinct_collapse, echo_trap, entropy_collapse
from cavesson.doctor.rules.group_advantages import UNLESS, group_advantages
from cavesson.doctor.rules.invariants import reference_replaced
from cavesson.doctor.rules.length import false_truncation, length_bias, length_exploited
from cavesson.doctor.rules.noise import reward_is_noise
from cavesson.doctor.rules.reward import over_optimised, reward_falls, reward_outliers
from cavesson.doctor.rules.sampling import end_forbidden
from cavesson.doctor.rules.verifier import ALL_EQUAL, FAILS, verifier_dead
from cavesson.record import write_rollouts, write_run

Array = np.ndarray[Any, np.dtype[Any]]
SIBLINGS = 8
NO_TOKENS = pa.table({name: pa.array([], pa.int32()) for name in ("step", "sample", "position")})


def table(columns: dict[str, Array]) -> pa.Table:
    return pa.table({name: values.ravel().tolist() for name, values in columns.items()})


def run(
    folder: Path,
    reward: Array,
    info: dict[str, Any] | None = None,
    tokens: dict[str, Array] | None = None,
    **columns: Any,
) -> RunData:
    """Write a record of rewards [S, B], other columns [S, B] and tokens [S, B, T] at once, and open it."""
    step, sample = np.indices(reward.shape)
    rows = {"step": step, "sample": sample, "reward": reward} | columns
    for name in ("prompt", "response"):
        rows.setdefault(name, np.full(reward.shape, "x"))
    places = NO_TOKENS
    if tokens:
        index = np.indices(tokens["logprob"].shape)
        places = table(dict(zip(("step", "sample", "position"), index, strict=True)) | tokens)
    write_run(folder, info or {})
    write_rollouts(folder, 0, table(rows), places)
    return RunData(cavesson.open(folder))


def judged(rule: Rule, data: RunData) -> Reading | None:
    """Return what the rule finds in the run or its latest parts; else what it reads in the whole run."""
    found = diagnose(data, [rule]).findings
    with np.errstate(all="ignore"):
        return found[0].reading if found else rule.statistic(data)


def sick(rule: Rule, data: RunData) -> bool:
    return bool(diagnose(data, [rule]).findings)


def prompts(steps: int, several: int, siblings: int = SIBLINGS) -> Array:
    """Return [S, B] the numbers of prompts, none of which recurs."""
    return np.repeat(np.arange(steps * several).reshape(steps, several), siblings, axis=1)


FLAT: dict[str, tuple[int, int, int]] = {"one prompt": (30, 1, 8), "single responses": (20, 8, 1), "long": (60, 1, 4)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", FLAT)
def test_flat_rewards_of_few_prompts_do_not_fall(kind: str, tmp_path: Path) -> None:
    """At a level of 1 %, more than two of 25 runs are named with a probability of 0.2 %."""
    steps, several, siblings = FLAT[kind]
    named = 0
    for seed in range(25):
        chance = np.random.default_rng(seed)
        reward = chance.normal(0, 1, (steps, several, 1)) + chance.normal(0, 1, (steps, several, siblings))
        flat = reward.reshape(steps, -1)
        named += sick(reward_falls, run(tmp_path / str(seed), flat, group=prompts(steps, several, siblings)))
    assert named <= 2


def test_lengths_that_the_prompt_of_a_step_decides_do_not_grow(tmp_path: Path) -> None:
    """Longer responses get more reward. That is not an exploit unless responses become longer."""
    named = 0
    for seed in range(25):
        chance = np.random.default_rng(seed)
        beside = np.exp(chance.normal(0, 0.2, (20, 8)))
        length = (100 * np.exp(chance.normal(0, 0.6, (20, 1))) * beside).astype(int)
        reward = beside + chance.normal(0, 0.1, beside.shape)
        named += sick(length_exploited, run(tmp_path / str(seed), reward, group=prompts(20, 1), length=length))
    assert named <= 1


@pytest.mark.parametrize("writes_more", [False, True])
def test_episodes_that_grow_by_turns_alone_do_not_exploit_length(writes_more: bool, tmp_path: Path) -> None:
    """A policy learns to call a tool before it answers, which is right more often and takes two turns."""
    chance = np.random.default_rng(0)
    share = np.linspace(0.1, 0.9, 20)[:, None]
    turns = 1 + (chance.random((20, 32)) < share)
    reward = (chance.random(turns.shape) < np.where(turns == 2, 0.95, 0.2)).astype(float)
    length = turns * 10 + chance.integers(-2, 3, turns.shape)
    if writes_more:
        reward = chance.normal(0, 1, turns.shape) + 10 * share
        length = turns * (10 + (5 * reward).astype(int))
    data = run(tmp_path / "run", reward, group=prompts(20, 4), length=length, turns=turns)
    assert sick(length_exploited, data) is writes_more
    if not writes_more:  # the same numbers, of single responses
        assert sick(length_exploited, run(tmp_path / "single", reward, group=prompts(20, 4), length=length))


@pytest.mark.parametrize("calls", [0, 1])
def test_an_episode_without_room_for_a_result_did_not_end_by_an_unknown_token(calls: int, tmp_path: Path) -> None:
    """Each response of 10 tokens, of 72 that it may have, ends in token 0, and may have called a tool."""
    ids = np.random.default_rng(0).integers(1, 50, (10, 32, 10))
    ids[..., -1] = 0
    each = np.ones(ids.shape[:2], int)
    columns = {"finish_reason": np.full(each.shape, "length"), "turns": each, "calls": calls * each}
    tokens = {"token_id": ids, "logprob": np.full(ids.shape, -1.0)}
    info = {"config": {"sampling": {"max_new_tokens": 72}}}
    assert sick(false_truncation, run(tmp_path / "run", each * 1.0, info, tokens, **columns)) is (calls == 0)


@pytest.mark.parametrize("begins", [3, 12, 24])
def test_a_reward_that_falls_at_once_is_named_wherever_it_falls(begins: int, tmp_path: Path) -> None:
    reward = np.random.default_rng(1).normal(0, 1, (32, 32))
    reward[begins:] -= 1.0
    assert sick(reward_falls, run(tmp_path / "run", reward))


def evaluated(folder: Path, seed: int, late: float) -> RunData:
    """64 held-out prompts at every 10th of 200 steps; both pass rates rise from 0.35, the held-out one changes late."""
    chance, held = np.random.default_rng(seed), 64
    difficulty = chance.beta(0.8, 0.8, held) - 0.5
    share = np.arange(200) / 200
    reward = (chance.random((200, 32)) < (0.35 + 0.1 * share)[:, None]).astype(float)
    steps = np.arange(9, 200, 10)
    rate = 0.35 + 0.1 * share[steps] + late * np.maximum(0, share[steps] - 0.5) * 2
    answers = (chance.random((20, held)) < np.clip(rate[:, None] + difficulty, 0, 1)).astype(float)
    step = np.concatenate([np.repeat(np.arange(200), 32), np.repeat(steps, held)])
    columns = {
        "step": step,
        "sample": np.concatenate([np.tile(np.arange(32), 200), np.tile(32 + np.arange(held), 20)]),
        "group": np.concatenate([prompts(200, 4).ravel(), np.tile(10_000 + np.arange(held), 20)]),
        "split": np.where(np.arange(len(step)) < reward.size, "train", "eval"),
        "reward": np.concatenate([reward.ravel(), answers.ravel()]),
    }
    columns |= {name: np.full(len(step), "x") for name in ("prompt", "response")}
    order = np.lexsort((columns["sample"], step))
    write_run(folder, {})
    write_rollouts(folder, 0, table({name: values[order] for name, values in columns.items()}), NO_TOKENS)
    return RunData(cavesson.open(folder))


def test_the_highest_of_many_evaluations_is_not_a_peak(tmp_path: Path) -> None:
    assert not any(sick(over_optimised, evaluated(tmp_path / str(seed), seed, 0.0)) for seed in range(8))
    assert sick(over_optimised, evaluated(tmp_path / "falls", 0, -0.5))


def distances(steps: int, several: int, spread: float, seed: int) -> Array:
    """Return [S, B, T] log π − log π_ref, whose size is log-normal between prompts."""
    chance = np.random.default_rng(seed)
    size = 0.1 * np.exp(chance.normal(0, spread, (steps, several, 1)) + chance.normal(0, 0.15, (steps, several, 8)))
    return np.asarray(size.reshape(steps, -1, 1) * chance.normal(0, 1.25, (steps, several * 8, 12)))


def scored(folder: Path, apart: Array) -> RunData:
    logprob = np.full(apart.shape, -2.0)
    return run(folder, np.zeros(apart.shape[:2]), tokens={"logprob": logprob, "ref_logprob": logprob - apart})


@pytest.mark.parametrize(("several", "spread"), [(1, 0.7), (1, 1.0), (4, 1.0)])
def test_prompts_at_different_distances_do_not_replace_the_reference(
    several: int, spread: float, tmp_path: Path
) -> None:
    found = [sick(reference_replaced, scored(tmp_path / str(i), distances(60, several, spread, i))) for i in range(3)]
    assert not any(found)


def test_a_reference_that_is_replaced_is_named_among_different_prompts(tmp_path: Path) -> None:
    """It becomes the policy of the step before at every 12th step, so that no distance is 0."""
    apart = distances(48, 4, 0.4, 0) * 0.3 * (np.arange(48) % 12 + 0.5)[:, None, None]
    found = judged(reference_replaced, scored(tmp_path / "run", apart))
    assert found is not None and found.unhealthy and found.words["times"] == 3 and found.since == 12


def sparse(seed: int, passing: float = 0.02) -> Array:
    """Return 0.1 · format + 1 · correct of 16 prompts with 8 responses each."""
    chance = np.random.default_rng(seed)
    right = chance.random((20, 128)) < passing
    return np.asarray(0.1 * (chance.random((20, 128)) < 0.9) + 1.0 * right)


def test_the_rare_right_answers_of_a_verifier_are_no_outliers(tmp_path: Path) -> None:
    for seed in range(3):
        assert not sick(reward_outliers, run(tmp_path / str(seed), sparse(seed), group=prompts(20, 16)))


@pytest.mark.parametrize(("needed", "named"), [(14, False), (100, True)])
def test_a_length_that_the_task_needs_is_not_exploited(needed: int, named: bool, tmp_path: Path) -> None:
    """Responses grow towards 14 tokens, and a few exceed them; each token up to the needed ones earns a part."""
    chance = np.random.default_rng(1)
    length = np.minimum(chance.poisson(np.linspace(7, 30, 24)[:, None], (24, 32)) + 1, 14)
    length = np.where(chance.random(length.shape) < 0.05, length + 6, length)
    reward = np.where(length <= needed, length, 4.0) / 14 + chance.normal(0, 0.02, length.shape)
    assert sick(length_exploited, run(tmp_path / "run", reward, group=prompts(24, 4), length=length)) == named


@pytest.mark.parametrize(("rare", "named"), [(2.0, False), (50.0, True)])
def test_a_verdict_far_beyond_the_others_is_an_outlier(rare: float, named: bool, tmp_path: Path) -> None:
    """Half of the answers earn 1; one in 50 is worth this many of them."""
    chance = np.random.default_rng(0)
    reward = (chance.random((20, 128)) < 0.5).astype(float)
    reward[chance.random(reward.shape) < 0.02] = rare
    found = judged(reward_outliers, run(tmp_path / "run", reward))
    assert (found is not None and found.unhealthy) == named


@pytest.mark.parametrize(("every", "named"), [(200, False), (20, True)])
def test_outliers_count_by_their_share_as_well(every: int, named: bool, tmp_path: Path) -> None:
    """Two of 51,200 rewards decide two of 400 steps; one in 2,560 decides every 20th step."""
    reward = np.random.default_rng(0).normal(0, 1, (400, 128))
    reward[::every, 7] = 90.0
    assert sick(reward_outliers, run(tmp_path / "run", reward)) == named


@pytest.mark.parametrize(("every", "named"), [(40, False), (5, True)])
def test_two_spikes_of_a_long_run_do_not_make_an_echo_trap(every: int, named: bool, tmp_path: Path) -> None:
    made = healthy("grpo", steps=80, batch=8)
    mean = made.rows["reward"].mean(1, keepdims=True)
    made.rows["reward"] = mean + (made.rows["reward"] - mean) * np.where(np.arange(80) < 6, 1, 0.05)[:, None]
    made.metrics["optim/grad_norm"][20::every] = 30
    assert reading(echo_trap, made, tmp_path / "run").unhealthy == named


@pytest.mark.parametrize("rewards", [0.0, -1.0, 1.0])
def test_a_reward_that_is_always_the_same_is_a_failure_only_if_it_is_low(rewards: float, tmp_path: Path) -> None:
    found = judged(verifier_dead, run(tmp_path / "run", np.full((6, 16), rewards)))
    assert found is not None and found.unhealthy
    assert found.words["why"] == (ALL_EQUAL if rewards > 0 else FAILS)


def test_the_lower_of_two_positive_rewards_is_a_failure(tmp_path: Path) -> None:
    reward = np.full((6, 32), 0.5)
    reward[0, 0] = 1.0
    found = judged(verifier_dead, run(tmp_path / "run", reward))
    assert found is not None and found.unhealthy and found.words["why"] == FAILS


@pytest.mark.parametrize("answers", ["recorded", "alike", "unknown"])
def test_one_question_about_many_images_does_not_make_a_reward_noise(answers: str, tmp_path: Path) -> None:
    """ "How many?" is asked of images that are not recorded. Only where the answer is always the same is it noise."""
    chance = np.random.default_rng(2)
    truth, said = chance.integers(1, 4, (12, 64)), chance.integers(1, 4, (12, 64))
    columns = {"response": said.astype(str), "prompt": np.full((12, 64), "How many?")}
    if answers != "unknown":
        columns["ground_truth"] = truth.astype(str) if answers == "recorded" else np.full((12, 64), "2")
    data = run(tmp_path / "run", (truth == said).astype(float), **columns)
    assert sick(reward_is_noise, data) == (answers == "alike")


@pytest.mark.parametrize(("moved", "named"), [(0.5, False), (6.0, True)])
def test_a_reward_that_words_do_not_predict_is_noise_only_if_much_was_tried(
    moved: float, named: bool, tmp_path: Path
) -> None:
    """Boxes of 24 numbers: at half a nat per response, a gain of 0.03 in overlap is slow learning."""
    chance = np.random.default_rng(3)
    reward = chance.beta(2, 3, (15, 128)) + np.linspace(0, 0.03, 15)[:, None]
    boxes = chance.integers(0, 1000, (15, 128, 24))
    text = np.array([[" ".join(map(str, box)) for box in step] for step in boxes], object)
    apart = np.linspace(0, moved / 24, 15)[:, None, None] + chance.normal(0, 0.01, boxes.shape)
    tokens = {"logprob": np.full(boxes.shape, -2.0), "ref_logprob": -2.0 - apart}
    places = np.arange(15 * 128).reshape(15, 128)
    columns = {"response": text, "prompt": places.astype(str), "group": places}
    columns |= {"length": np.full(reward.shape, 24), "kl_k1": apart.sum(-1)}
    data = run(tmp_path / "run", reward, tokens=tokens, **columns)
    found = judged(reward_is_noise, data)
    assert found is not None and found.unhealthy == named and (named or found.undecided is not None)


def short_form(folder: Path, has_form: bool) -> RunData:
    """Two in five answers have six tokens, hardly any a few more, and the others 10 to 60."""
    chance, shape = np.random.default_rng(4), (8, 64)
    few = np.where(chance.random(shape) < 0.03, chance.integers(7, 10, shape), chance.integers(10, 61, shape))
    length = np.where(chance.random(shape) < 0.4, 6, few)
    words = [" ".join(f"w{i}" for i in chance.integers(0, 400, size - 1)) for size in length.ravel()]
    form = [f"The answer is {i} ." for i in chance.integers(0, 1000, length.size)]
    short = (length == 6).ravel() & has_form
    text = np.array([f if is_short else w for f, w, is_short in zip(form, words, short, strict=True)], object)
    tokens = {"logprob": np.full((*shape, 60), -1.5), "mask": np.arange(60) < length[..., None]}
    info = {"trainer": "verl"}
    return run(folder, np.zeros(shape), info, tokens, response=text.reshape(shape), length=length)


@pytest.mark.parametrize("has_form", [True, False])
def test_a_short_form_is_not_taken_for_a_ban_on_ends(has_form: bool, tmp_path: Path) -> None:
    found = judged(end_forbidden, short_form(tmp_path / "run", has_form))
    assert found is not None and not found.unhealthy and "one form" in str(found.undecided)


BASELINES: dict[str, Callable[[Array, Array], Array]] = {
    "opo": lambda reward, length: (reward * length).sum(-1, keepdims=True) / length.sum(-1, keepdims=True),
    "remax": lambda reward, length: reward[..., :1] + 0.3,
}


@pytest.mark.parametrize("estimator", ["opo", "remax", "grpo", None])
def test_other_baselines_are_judged_only_where_the_settings_do_not_name_them(
    estimator: str | None, tmp_path: Path
) -> None:
    chance = np.random.default_rng(5)
    reward, length = chance.normal(0, 1, (10, 6, 5)), chance.integers(3, 40, (10, 6, 5)).astype(float)
    advantage = (reward - BASELINES["remax" if estimator == "remax" else "opo"](reward, length)).reshape(10, 30)
    config = {"algorithm": {"adv_estimator": estimator}} if estimator else {}
    info = {"trainer": "verl", "config": config}
    tokens = {"logprob": np.full((10, 30, 2), -1.0), "advantage": np.repeat(advantage[..., None], 2, axis=2)}
    found = judged(
        group_advantages, run(tmp_path / "run", reward.reshape(10, 30), info, tokens, group=prompts(10, 6, 5))
    )
    assert found is not None
    if estimator in BASELINES:
        assert not found.unhealthy and "baseline" in str(found.undecided)
    else:
        assert found.unhealthy and (found.words["unless"] == UNLESS) == (estimator is None)


LOSSES = [
    ({"loss_type": "grpo"}, True),
    ({"loss_type": "dapo"}, False),
    ({"grpo": {"normalise": "sequence"}}, True),
    ({"grpo": {"normalise": "constant"}}, False),
    ({"actor_rollout_ref": {"actor": {"loss_agg_mode": "token-mean"}}}, False),
    ({}, True),
]


@pytest.mark.parametrize(("config", "named"), LOSSES)
def test_a_loss_that_is_not_divided_by_length_is_not_to_blame_for_long_mistakes(
    config: dict[str, Any], named: bool, tmp_path: Path
) -> None:
    chance = np.random.default_rng(6)
    right = np.tile(np.arange(32) % 2 == 0, (24, 1))
    length = 20 + chance.integers(0, 3, right.shape) + np.where(right, 0, np.arange(24)[:, None])
    info = {"algorithm": "grpo", "config": config}
    data = run(tmp_path / "run", right.astype(float), info, group=prompts(24, 4), length=length)
    assert sick(length_bias, data) == named


@pytest.mark.parametrize(("shorter", "named"), [(0, True), (20, False)])
def test_mistakes_that_become_as_long_as_right_answers_are_not_biased(
    shorter: int, named: bool, tmp_path: Path
) -> None:
    """Wrong answers start this many tokens shorter and grow by one per step; they end 23 or 3 tokens longer."""
    right = np.tile(np.arange(32) % 2 == 0, (24, 1))
    length = 40 + np.random.default_rng(7).integers(0, 3, right.shape)
    length += np.where(right, 0, np.arange(24)[:, None] - shorter)
    data = run(tmp_path / "run", right.astype(float), {"algorithm": "grpo"}, group=prompts(24, 4), length=length)
    assert sick(length_bias, data) == named


def changed(rule: Rule, name: str, value: Any) -> Any:
    """Return what a rule proposes for a value of a setting that any data may have."""
    return rule.settings[name](value, None, None)


@pytest.mark.parametrize(
    ("rule", "name", "low", "raised", "high"),
    [
        (entropy_collapse, "grpo.clip_high", 0.2, 0.28, 0.4),
        (entropy_collapse, "ppo.entropy_coef", 0.0, 0.01, 0.05),
        (distinct_collapse, "sampling.temperature", 0.7, 1.0, 1.2),
        (echo_trap, "rloo.clip_high", 0.2, 0.28, 0.4),
    ],
)
def test_what_a_fix_raises_is_never_lowered(rule: Rule, name: str, low: float, raised: float, high: float) -> None:
    assert (changed(rule, name, low), changed(rule, name, high)) == (raised, high)


def test_a_loss_that_is_immune_to_length_stays(tmp_path: Path) -> None:
    assert [changed(length_bias, "grpo.normalise", value) for value in ("sequence", "token", "constant")] == [
        "token", "token", "constant",
    ]  # fmt: skip


def test_rewards_that_are_clipped_below_stay_so(tmp_path: Path) -> None:
    data = run(tmp_path / "run", np.full((4, 16), 3.0))
    clip = reward_outliers.settings["shaping.clip"]
    assert [clip(value, data, None) for value in (None, 2.0, 50.0)] == [6.0, 2.0, 6.0]
