"""What other trainers rightly do and record differently, and what is still wrong in their runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doctor_helpers import END, LENGTH, Made, healthy

import cavesson
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import Detection, diagnose
from cavesson.doctor.failures import not_excluded
from cavesson.doctor.reading import Reading, Skipped
from cavesson.doctor.rules import RULES
from cavesson.doctor.rules.invariants import trained_behind_end
from cavesson.doctor.rules.kl import kl_explosion, kl_flat, negative_kl, unknown_estimate
from cavesson.doctor.rules.mismatch import sampler_mismatch
from cavesson.doctor.rules.token_rewards import reward_accounting, rewards_shifted
from cavesson.doctor.rules.update import clip_fraction_high, gradient_spike, ratio_blow_up
from cavesson.doctor.words import language
from cavesson.findings.words import Phrase
from cavesson.integrations.verl import rollouts_of
from cavesson.record import Recorder, begin_attempt, write_run, write_vocabulary


def verl_record(made: Made, folder: Path, scale: float = 1.0) -> RunData:
    """Record a run as the hook for verl does, which sees the scores, and the token rewards with the penalty in them."""
    write_run(folder, {"trainer": "verl"})
    last = np.arange(LENGTH) == made.mask.sum(-1, keepdims=True) - 1
    scores = np.where(last, scale * made.rows["reward"][..., None], 0.0)
    columns = {"responses": "token_id", "old_log_probs": "logprob", "ref_log_prob": "ref_logprob",
               "response_mask": "mask", "token_level_rewards": "token_reward"}  # fmt: skip
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(len(made.mask)):
            tensors = {theirs: made.tokens[ours][step] for theirs, ours in columns.items()}
            tensors |= {"prompts": np.ones((len(made.mask[0]), 1)), "token_level_scores": scores[step]}
            tensors["attention_mask"] = np.concatenate([tensors["prompts"] > 0, made.mask[step]], 1)
            batch = {name: torch.as_tensor(values) for name, values in tensors.items()}
            recorder.rollouts(step, *rollouts_of(SimpleNamespace(batch=batch, non_tensor_batch={}), tokenizer))
    return RunData(cavesson.open(folder))


def test_a_penalty_in_verls_token_rewards_is_accounted_for_once(tmp_path: Path) -> None:
    """Σ token_reward = score − β·Σ KL; a score that is scaled on its way is still found."""
    data = verl_record(healthy(), tmp_path / "healthy")
    assert "reward-accounting" in [rule.name for rule, _ in diagnose(data, RULES).healthy]
    scaled = reward_accounting.statistic(verl_record(healthy(), tmp_path / "scaled", 0.5))
    assert scaled is not None and scaled.unhealthy


PAD = 20
"""A token that no policy samples here."""


def two_turns(turn: int = 6, tool: int = 4) -> Made:
    """Each response has two turns that end in an end token, and between them what a tool wrote, which is masked."""
    made, chance = healthy(steps=10, batch=16), np.random.default_rng(7)
    ids = chance.integers(1, 10, made.mask.shape)
    ids[..., turn - 1] = ids[..., 2 * turn + tool - 1] = END
    where = np.arange(LENGTH)
    made.tokens["token_id"] = ids
    made.tokens["mask"] = np.broadcast_to(
        (where < turn) | ((where >= turn + tool) & (where < 2 * turn + tool)), ids.shape
    ).copy()
    return made


def without_gaps(made: Made) -> Made:
    """Move the trained tokens together, as a trainer that stores only these does."""
    order = np.argsort(~made.mask, axis=-1, kind="stable")
    made.tokens = {name: np.take_along_axis(column, order, -1) for name, column in made.tokens.items()}
    return made


@pytest.mark.parametrize("name", ["</s>", "zebra"])
def test_an_end_token_is_known_by_its_name_in_the_vocabulary(name: str, tmp_path: Path) -> None:
    """A sampler that the end token does not stop: the token ends no response, and no setting names it."""
    made = healthy()
    made.info = {"trainer": "trl 1.10.0", "algorithm": "ppo"}
    ended = ~made.mask
    made.tokens["token_id"] = np.where(ended, PAD - 1 - np.arange(LENGTH) % 7, made.tokens["token_id"])
    made.tokens["logprob"] = np.where(ended, -1.0, made.tokens["logprob"])
    made.tokens["mask"] = np.ones_like(ended)
    folder = made.write(tmp_path / "run")
    names = [name, *map(str, range(1, PAD + 1))]
    write_vocabulary(folder, names, names)
    data = RunData(cavesson.open(folder))
    assert data.setting("eos_token_ids") == ([END] if name == "</s>" else None)
    found = [one.rule.name for one in diagnose(data, RULES).findings]
    assert ("trained-behind-end" in found) == (name == "</s>")


def test_a_turn_after_a_tools_result_is_rightly_trained(tmp_path: Path) -> None:
    made = two_turns()
    made.info["trainer"] = "trl 1.16.0"
    found = trained_behind_end.statistic(made.data(tmp_path))
    assert found is not None and not found.unhealthy and found.seen == 0


@pytest.mark.parametrize("ended", [1.0, 0.7])
def test_turns_that_are_not_marked_leave_it_undecided(ended: float, tmp_path: Path) -> None:
    """In some responses the last turn is cut, so that nothing ends it."""
    made = without_gaps(two_turns())
    made.info["trainer"] = "openrlhf"
    cut = np.random.default_rng(3).random(made.mask.shape[:2]) > ended
    made.tokens["mask"][..., 11] &= ~cut
    found = diagnose(made.data(tmp_path), [trained_behind_end])
    assert not found.findings
    (said,) = found.skipped
    assert said.undecided and "does not mark turns" in said.reason


@pytest.mark.parametrize("pad", [PAD, END])
@pytest.mark.parametrize("gaps", [True, False])
def test_padding_behind_the_last_turn_is_wrongly_trained(gaps: bool, pad: int, tmp_path: Path) -> None:
    """Three tokens of padding: 3 of 15 trained ones."""
    made = two_turns()
    made.tokens["token_id"][..., 16:] = pad
    made.tokens["mask"][..., 16:19] = True
    made.info["trainer"] = "trl 1.16.0" if gaps else "openrlhf"
    found = trained_behind_end.statistic((made if gaps else without_gaps(made)).data(tmp_path))
    assert found is not None and found.unhealthy
    assert found.seen == pytest.approx(3 / 15)


def test_a_tools_result_that_is_trained_too_is_text_after_the_end(tmp_path: Path) -> None:
    """TRL's record would have a gap there if it were masked: 10 of 16 trained tokens follow the first end token."""
    made = two_turns()
    made.tokens["mask"][..., :16] = True
    made.info["trainer"] = "trl 1.16.0"
    found = trained_behind_end.statistic(made.data(tmp_path))
    assert found is not None and found.unhealthy
    assert found.seen == pytest.approx(10 / 16)


def scalars(folder: Path, steps: int = 60, info: dict[str, Any] | None = None, **metrics: Any) -> RunData:
    """Record metrics alone, under the names that a trainer gives them ("__" stands for "/")."""
    write_run(folder, info or {"trainer": "trl 1.16.0", "algorithm": "grpo"})
    with Recorder(folder, attempt=begin_attempt(folder, 0)) as recorder:
        for step in range(steps):
            found = {name.replace("__", "/"): float(np.broadcast_to(m, steps)[step]) for name, m in metrics.items()}
            recorder.metrics(step, found)
    return RunData(cavesson.open(folder))


def test_metrics_alone_are_judged(tmp_path: Path) -> None:
    """Gradient norms of NaN, ratios of 5 and a KL of −3 nats per response, and nothing else was recorded."""
    data = scalars(tmp_path, grad_norm=np.nan, objective__kl=-3.0, val__ratio=5.0)
    found = diagnose(data, RULES)
    assert {"not-finite", "negative-kl", "ratio-blow-up"} <= {one.rule.name for one in found.findings}
    assert "gradient-spike" in [one.rule for one in found.skipped]


def test_a_rule_on_metrics_counts_the_steps_that_were_logged(tmp_path: Path) -> None:
    data = scalars(tmp_path / "few", steps=4, grad_norm=1.0)
    (said,) = diagnose(data, [gradient_spike]).skipped
    assert said.words == {"least": 10.0, "steps": 4.0}
    made = healthy(steps=24)
    made.metrics = {"grad_norm": np.where(np.arange(24) % 10 == 9, 1.0, np.nan)}
    (said,) = diagnose(made.data(tmp_path / "sparse"), [gradient_spike]).skipped
    assert said.words == {"least": 10.0, "steps": 2.0}


@pytest.mark.parametrize("length", [{}, {"completions__mean_length": 200.0}, {"response_length__mean": 200.0}])
@pytest.mark.parametrize("name", ["kl", "actor__reward_kl_penalty", "train__kl"])
def test_a_kl_per_token_is_judged_as_that_of_a_response(name: str, length: dict[str, float], tmp_path: Path) -> None:
    """2.8 nats per token explode, −0.04 are −8 per response, and 8e-5 are 0.016: a policy that warms up and moves."""
    rising = scalars(tmp_path / "rising", **{name: np.linspace(0.0, 2.8, 60)}, **length)
    assert [one.rule.name for one in diagnose(rising, [kl_explosion]).findings] == ["kl-explosion"]
    negative = scalars(tmp_path / "negative", **{name: -0.04}, **length)
    assert [one.rule.name for one in diagnose(negative, [negative_kl]).findings] == ["negative-kl"]
    warming = scalars(tmp_path / "warming", steps=30, **{name: np.linspace(0.0, 8e-5, 30)}, **length)
    assert not diagnose(warming, [kl_flat]).findings
    frozen = scalars(tmp_path / "frozen", steps=30, **{name: np.zeros(30)}, **length)
    assert [one.rule.name for one in diagnose(frozen, [kl_flat]).findings] == ["kl-flat"]
    near = scalars(tmp_path / "near", **{name: np.linspace(0.0, 0.1, 60)}, **length)
    assert not diagnose(near, [kl_explosion, negative_kl]).findings


def test_a_kl_per_response_is_not_multiplied(tmp_path: Path) -> None:
    """TRL's PPO logs 8 nats of responses of 200 tokens."""
    data = scalars(tmp_path, objective__kl=np.linspace(0.0, 8.0, 60), completions__mean_length=200.0)
    assert not diagnose(data, [kl_explosion]).findings


def tokens_mean(made: Made, values: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(made.mask, values, 0).sum((1, 2)) / made.mask.sum((1, 2)))


def every_tenth(made: Made, folder: Path, kl: np.ndarray) -> RunData:
    """Record a run whose metrics are logged every 10th step, as by default in TRL: for the last of the 10 steps."""
    made.info["trainer"] = "trl 1.16.0"
    made.metrics = {"kl": np.full(len(kl), np.nan)}
    made.metrics["kl"][9::10] = kl.reshape(-1, 10).mean(1)
    return made.data(folder)


def test_the_mean_of_ten_steps_over_tokens_is_a_known_estimate(tmp_path: Path) -> None:
    """TRL logs the mean of k3 over the tokens of a step, and of that the mean over logging_steps."""
    made = healthy(steps=60)
    delta = made.tokens["logprob"] - made.tokens["ref_logprob"]
    delta *= np.linspace(1, 8, 60)[:, None, None] * np.where(made.mask.sum(-1, keepdims=True) < 4, 4, 1)
    made.tokens["logprob"] = made.tokens["ref_logprob"] + delta
    k3 = tokens_mean(made, np.exp(-delta) - 1 + delta)
    found = unknown_estimate.statistic(every_tenth(made, tmp_path / "right", k3))
    assert found is not None and not found.unhealthy and found.seen < 1e-3
    found = unknown_estimate.statistic(every_tenth(made, tmp_path / "wrong", 1.6 * k3 + 0.02))
    assert found is not None and found.unhealthy


def test_a_mean_over_tokens_is_a_known_estimate_in_each_step(tmp_path: Path) -> None:
    """Short responses are four times as far away, so that the mean of responses' means is another number."""
    made = healthy()
    delta = made.tokens["logprob"] - made.tokens["ref_logprob"]
    delta = np.where(made.mask, 0.1 + delta * np.where(made.mask.sum(-1, keepdims=True) < 6, 8, 0.5), 0.0)
    made.tokens["logprob"] = made.tokens["ref_logprob"] + delta
    made.metrics = {"kl": tokens_mean(made, np.abs(delta))}
    found = unknown_estimate.statistic(made.data(tmp_path))
    assert found is not None and not found.unhealthy and found.seen < 1e-4


def test_a_run_that_is_too_short_excludes_no_collapse(tmp_path: Path) -> None:
    """Three steps with all tokens; where the run is long enough, the same rules speak."""
    few = diagnose(healthy(steps=3).data(tmp_path / "few"), RULES)
    said = {str(one.failure.title): one for one in not_excluded(few)}
    reasons = [language("en").reason(one) for one in said["the policy collapses"].reasons]
    assert "needs 20 steps; the record has 3" in reasons or "needs 8 steps; the record has 3" in reasons, reasons
    many = diagnose(healthy(steps=64).data(tmp_path / "many"), RULES)
    # "template-collapse" cannot judge it, because all prompts differ in one word; but it looks for one form of it only.
    assert "template-collapse" in [one.rule for one in many.skipped]
    assert "the policy collapses" not in [one.failure.title for one in not_excluded(many)]


def test_a_folded_finding_does_not_hide_that_the_cause_of_its_kind_is_unknown(tmp_path: Path) -> None:
    """Shrinking responses that follow from something else, or a note, say nothing of the entropy."""
    made = healthy(steps=40)
    found = diagnose(made.data(tmp_path), RULES)
    (lengths,) = [rule for rule in RULES if rule.name == "length-collapse"]
    (skipped,) = [Skipped("entropy-collapse", 51, Phrase("not recorded"), lacking=("tokens.entropy",))]
    for finding, is_open in (
        (Detection(lengths, Reading(1.0, True)), False),
        (Detection(lengths, Reading(1.0, True), cause=False), True),
        (Detection(replace(lengths, severity="note"), Reading(1.0, True)), True),
    ):
        titles = [one.failure.title for one in not_excluded(replace(found, findings=(finding,), skipped=(skipped,)))]
        assert ("the policy collapses" in titles) == is_open


@pytest.mark.parametrize(("dtype", "sick"), [("float32", True), (None, False), ("bfloat16", False)])
def test_a_sampler_of_unknown_precision_may_round(dtype: str | None, sick: bool, tmp_path: Path) -> None:
    """|δ| of 0.04 on every token: e^0.04 = 1.041, between the limits of float32 (1.03) and of bfloat16 (1.05)."""
    made = healthy()
    sign = np.where(np.arange(LENGTH) % 2, 1, -1)
    made.tokens["sampler_logprob"] = made.tokens["logprob"] + np.where(made.mask, 0.04 * sign, 0.0)
    made.info["config"]["model"]["dtype"] = dtype
    found = sampler_mismatch.statistic(made.data(tmp_path))
    assert found is not None and found.unhealthy == sick and found.seen == pytest.approx(np.exp(0.04), abs=1e-3)


GSPO: list[dict[str, Any]] = [
    {"importance_sampling_level": "sequence"},
    {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "gspo"}}}},
    {"actor": {"policy_loss_type": "gspo"}},
]


@pytest.mark.parametrize("config", GSPO)
def test_ratios_of_whole_responses_clip_by_design_in_every_trainer(config: dict[str, Any], tmp_path: Path) -> None:
    """GSPO clips 0.6 of its tokens (2507.18071, section 5.2 reports two orders of magnitude more than GRPO)."""
    info = {"algorithm": "grpo", "config": config}
    assert not diagnose(scalars(tmp_path / "gspo", info=info, clip_ratio=0.6), [clip_fraction_high]).findings
    info = {"algorithm": "grpo", "config": {}}
    assert diagnose(scalars(tmp_path / "grpo", info=info, clip_ratio=0.6), [clip_fraction_high]).findings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"loss_type": "grpo"}, True),
        ({"loss_type": "dapo"}, False),
        ({"loss_type": "dr_grpo"}, False),
        ({"loss_type": "another"}, None),
        ({"actor_rollout_ref": {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}}, True),
        ({"actor": {"loss_agg_mode": "token-mean"}}, False),
    ],
)
def test_whether_a_loss_is_divided_by_lengths_is_read_in_every_trainer(
    config: dict[str, Any], expected: bool | None, tmp_path: Path
) -> None:
    data = scalars(tmp_path, steps=1, info={"config": config}, loss=0.0)
    assert data.traits.get("length_normalised") == expected


@pytest.mark.parametrize(("bad", "sick"), [(2, False), (30, True)])
def test_two_odd_batches_in_a_long_run_are_no_blow_up(bad: int, sick: bool, tmp_path: Path) -> None:
    """Of 1,000 ratios, 2 or 30 are 2.5, which is outside of 0.3 to 2; one in fifty steps may be."""
    ratio = np.ones(1000)
    ratio[np.linspace(100, 950, bad).astype(int)] = 2.5
    found = ratio_blow_up.statistic(scalars(tmp_path, steps=1000, val__ratio=ratio))
    assert found is not None and found.unhealthy == sick


def whitened(made: Made, shifts: bool, estimator: str = "k1", growing: bool = False, behind: int = 0) -> Made:
    """Whiten token rewards as TRL does: (r − μ)/σ over the tokens of a step, and μ again unless it shifts the mean.

    The score is on the last token, or where there is room, on the one ``behind`` it, which is whitened, too.
    """
    delta, at = made.tokens["logprob"] - made.tokens["ref_logprob"], made.mask.sum(-1, keepdims=True) - 1 + behind
    at = np.minimum(at, LENGTH - 1)
    beta = 0.05 * np.linspace(1, 3 if growing else 1, len(delta))[:, None, None]
    score = np.where(np.arange(LENGTH) == at, made.rows["reward"][..., None], 0.0)
    reward = score - np.where(made.mask, beta * (delta if estimator == "k1" else np.exp(-delta) - 1 + delta), 0.0)
    for of_step, kept in zip(reward, np.arange(LENGTH) <= at, strict=True):
        mean, spread = of_step[kept].mean(), of_step[kept].std()
        of_step[:] = np.where(kept, (of_step - mean) / spread + (0.0 if shifts else mean), 0.0)
    made.tokens["token_reward"] = reward
    made.info = {"trainer": "trl 1.10.0", "algorithm": "ppo"}
    return made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("growing", [False, True])
def test_whitening_that_moves_the_mean_is_found_and_without_is_healthy(
    estimator: str, growing: bool, tmp_path: Path
) -> None:
    """Without a shift, the inner rewards contain a constant as well, μ·(1 − 1/σ): a constant does not prove a shift."""
    for shifts in (False, True):
        made = whitened(healthy(), shifts, estimator, growing)
        found = rewards_shifted.statistic(made.data(tmp_path / f"{shifts}"))
        assert found is not None and found.unhealthy == shifts
        if shifts:
            assert found.since == 0 and found.seen == 1.0
    made = healthy()
    made.info = {"trainer": "trl 1.10.0", "algorithm": "ppo"}
    assert rewards_shifted.statistic(made.data(tmp_path / "as they are")) is None


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("shifts", [False, True])
def test_whitening_is_judged_without_the_tokens_that_have_the_scores(
    estimator: str, shifts: bool, tmp_path: Path
) -> None:
    """Our hook in TRL's PPO records trained tokens; where a response has ended, the score is on the next one.

    What is recorded has neither a mean of 0 nor a variance of 1, whether or not the mean was shifted.
    """
    made = whitened(healthy(), shifts, estimator, behind=1)
    made.rows["kl_coef"] = np.full(made.rows["reward"].shape, 0.05)
    made.info["config"] = {"whiten_rewards": True, "kl_estimator": estimator}
    found = rewards_shifted.statistic(made.data(tmp_path))
    assert found is not None and found.unhealthy == shifts
    assert found.seen == (1.0 if shifts else pytest.approx(0.0, abs=0.2))


def test_rewards_of_a_mean_near_0_that_are_only_scaled_are_healthy(tmp_path: Path) -> None:
    """Scores of mean 0 in a large batch: their mean is small, but not exactly 0."""
    made = healthy(batch=256)
    made.rows["reward"] = np.random.default_rng(5).normal(size=made.rows["reward"].shape)
    found = rewards_shifted.statistic(whitened(made, False).data(tmp_path))
    assert found is not None and not found.unhealthy and found.seen < 0.3


@pytest.mark.parametrize("source", ["user", "sampled"])
def test_a_reply_may_end_in_an_end_token(source: str, tmp_path: Path) -> None:
    """What follows a user's reply is the next turn; behind tokens of the policy, it is text after the end."""
    ids, said = [3, 4, 9, 6, 9, 3, 4, 9], ["sampled"] * 3 + [source] * 2 + ["sampled"] * 3
    learned = [True] * 3 + [False] * 2 + [True] * 3
    write_run(tmp_path / "run", {"algorithm": "grpo", "eos_token_ids": [9], "trainer": "trl 1.16.0"})
    with Recorder(tmp_path / "run", attempt=begin_attempt(tmp_path / "run", start_step=0)) as recorder:
        for step in range(4):
            rows = {"prompt": ["a"] * 8, "response": ["b"] * 8, "reward": np.arange(8.0), "sample": np.arange(8)}
            tokens = {"token_id": [ids] * 8, "source": [said] * 8, "learned": [learned] * 8}
            recorder.rollouts(step, rows, tokens)
    found = trained_behind_end.statistic(RunData(cavesson.open(tmp_path / "run")))
    assert found is not None and found.seen == (0 if source == "user" else pytest.approx(3 / 6))
