"""Rules on identities of rewards: the penalty, the score, and their positions."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cavesson.doctor.absent import no_token_rewards, not_in_rewards, not_whitened
from cavesson.doctor.data import RunData
from cavesson.doctor.derive.critic import are_white, recorded_white
from cavesson.doctor.derive.penalty import MATCHED, ROUNDED, clear, least_deviations, of_advantages
from cavesson.doctor.groups import mean_of
from cavesson.doctor.reading import Curve, Reading, Words
from cavesson.doctor.readings import exceeds
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import MISLED, RUNAWAY
from cavesson.doctor.rules.returns import may_follow, penalty, turn_rewards, without_penalty
from cavesson.doctor.series import (
    Array,
    Series,
    earliest,
    mean_by_step,
    series,
    since,
    slope_by_step,
    standard_error,
    together,
)
from cavesson.findings.finding import Evidence
from cavesson.findings.words import Phrase, Share

PENALTY = ("tokens.token_reward", "tokens.logprob", "tokens.ref_logprob", "rows.kl_coef")
"""What shows the penalty of each token."""
CLEAR = 3.0
"""Standard errors by which the coefficient of the penalty must be off."""
MIN_STEPS = 3
"""Steps whose advantages show the coefficient of the penalty."""
MIN_INNER = 50
"""Tokens of a step that show how its rewards were whitened."""
SCALE = 0.002
"""Relative error with which they must show it."""


@rule(
    number=5,
    needs=["tokens.token_reward|rows.penalised_advantage", *PENALTY[1:]],
    traits=["kl_place"],
    severity="error",
    title="The KL penalty has the wrong sign or size",
    cause="The KL penalty has another size or sign than the settings say: regressed on the recorded log-ratios, {what} "
    "give a coefficient of {found}, while the run's is {beta}{flipped}.",
    healthy="β from the token rewards, or from the advantages of groups, divided by the β of the run: {low} to {high}",
    fix="compute the penalty as −β·(log π − log π_ref) on the response's own tokens; test it on two tokens by hand",
    source="OpenAI's flipped sign (Fine-tuning GPT-2 from human preferences); Schulman, Approximating KL divergence; "
    "RLOO 2402.14740, section 2",
    explains=["kl-explosion", "reward-accounting", "group-advantages", "negative-kl", "kl-flat", *RUNAWAY],
    windows=True,
    absent=not_in_rewards,
)
def penalty_wrong(data: RunData, *, low: float = 0.95, high: float = 1.05) -> Reading | None:
    if recorded_white(data):
        return None  # whitening divides the penalty by a number that differs from step to step
    seen = _in_token_rewards(data) if data.has("tokens.token_reward") else _in_advantages(data)
    if seen is None:
        return None
    what, shares, curve, evidence = seen
    found = float(np.median(shares))
    # Other rewards on these tokens, such as those of single steps of a solution, make the share uncertain.
    error = CLEAR * standard_error(shares) if len(shares) > 1 else 0.0
    coef = data.sample.rows["kl_coef"]
    beta = float(np.median(coef[coef > 0]))
    flipped = Phrase(
        ": the sign is flipped, so the policy is rewarded for moving away from the reference" if found < 0 else ""
    )
    words: Words = {"what": what, "found": found * beta, "beta": beta, "flipped": flipped}
    unhealthy = found + error < low or found - error > high
    first = int(data.sample.rows.steps[0])
    return Reading(found, unhealthy, first, evidence, words, replace(curve, low=low, high=high))


class _Seen(NamedTuple):
    """What the record shows of the coefficient of the penalty."""

    what: Phrase
    """Where it was read."""
    shares: Array
    """[P] the coefficient divided by the run's β, in several parts of the run."""
    curve: Curve
    evidence: tuple[Evidence, ...]


def _in_token_rewards(data: RunData) -> _Seen | None:
    sample, reward = data.sample, data.sample["token_reward"] - turn_rewards(data)
    expected = sample.rows["kl_coef"][sample.line] * penalty(data, sample)
    inner = sample.trained & ~sample.last & np.isfinite(expected + reward) & (sample.rows["kl_coef"][sample.line] > 0)
    if inner.sum() < 50 or np.std(expected[inner]) < 1e-6:
        return None
    # A reward that is the same for all tokens of a response is not a penalty.
    asked, got = (values[inner] - mean_of(sample.line[inner], values[inner]) for values in (expected, reward))
    shares = -_slopes(asked, got)
    curve = Curve(slope_by_step(sample.step[inner], asked, -got))
    return _Seen(
        Phrase("the rewards of all tokens but the last"),
        shares,
        curve,
        sample.worst(np.where(inner, np.abs(reward + expected), np.nan)),
    )


def _in_advantages(data: RunData) -> _Seen | None:
    """Read the coefficient from the advantages of groups, where the penalty of a response is part of its reward."""
    rows, estimator = data.sample.rows, str(data.setting("kl.estimator"))
    fits = of_advantages(data.sample)
    fit = fits.get(estimator)
    if fit is None or (fit.matched < MATCHED and clear(fits) in (None, estimator)):
        return None
    beta = rows.by_step(rows["kl_coef"])
    found, beta = together(Series(fit.steps, fit.beta), beta.where(beta.value > 0))
    if len(found) < MIN_STEPS:
        return None
    shares = found.value / beta.value
    worst = found.step[np.argsort(-np.abs(shares - 1))]
    what = Phrase("the advantages of the responses to a prompt")
    return _Seen(what, shares, Curve(Series(found.step, shares)), data.step_evidence(worst))


def _slopes(x: Array, y: Array, parts: int = 20) -> Array:
    """Return least-squares slopes of random parts of the points; their median is robust against a few outliers."""
    order = np.random.default_rng(0).permutation(len(x))
    found = []
    for part in np.array_split(order, min(parts, max(1, len(x) // 20))):
        variance = float(np.var(x[part]))
        if variance > 0:
            found.append(float(np.mean((x[part] - x[part].mean()) * (y[part] - y[part].mean()))) / variance)
    return np.array(found or [np.nan])


@rule(
    number=6,
    needs=[*PENALTY, "rows.reward|rows.shaped_reward"],
    severity="error",
    title="The reward is on the wrong token",
    cause="The token rewards without the KL penalty are the score, which belongs on the last token of the response. In "
    "{seen} of the responses it is elsewhere: on the first padding token or the first end token, or an index is off "
    "by one.",
    healthy="share of responses whose score is not on the last token: 0, at most {limit}",
    fix="put the score at the index of the last token that the mask keeps",
    source="The N implementation details of RLHF with PPO (the reward model's index)",
    explains=["reward-accounting", "penalty-wrong", "value-start", *MISLED],
    windows=True,
    absent=no_token_rewards,
)
def reward_position(data: RunData, *, limit: float = Share(0.03)) -> Reading | None:
    sample = data.sample
    if recorded_white(data):
        return None  # whitening changes all token rewards
    turns = turn_rewards(data)
    rest = without_penalty(data, sample) - turns
    score = (sample.rows.trained_reward - np.bincount(sample.line, turns, len(sample.rows)))[sample.line]
    # A score near 0 cannot be located, because a token reward is recorded with eleven bits of precision.
    clear = np.isfinite(rest) & (np.abs(score) > 0.05)
    off = np.abs(rest - score) / np.maximum(np.abs(score), 1e-9)
    lacking = np.unique(sample.line[clear & sample.last & (off > 0.5)])
    whole = np.bincount(sample.line, np.where(np.isfinite(rest), np.abs(rest), 0.0))[sample.line]
    alone = ~sample.last & (off < 0.1) & (np.abs(rest) > 0.5 * whole)
    if may_follow(data):
        alone &= ~sample.behind
    elsewhere = np.flatnonzero(clear & alone & np.isin(sample.line, lacking))
    there = np.unique(sample.line[clear & sample.last])
    if not len(there):
        return None
    wrong = np.isin(np.arange(len(sample.rows)), sample.line[elsewhere])
    share, unhealthy = Share(wrong.sum() / len(there)), exceeds(data, wrong.sum(), len(there), limit)
    curve = Curve(sample.rows.by_step(wrong.astype(float)), high=limit)
    return Reading(share, unhealthy, earliest(sample.rows.step[wrong]), sample.spans(elsewhere), curve=curve)


@rule(
    number=7,
    needs=[*PENALTY, "rows.reward|rows.shaped_reward"],
    severity="error",
    title="The token rewards do not add up to the reward",
    cause="In {seen} of the responses, the token rewards do not add up to the reward minus the KL penalty, "
    "by {size} in the median: an unrecorded step clips, scales, whitens or drops a part.",
    healthy="share of responses whose token rewards differ from reward − β·KL by more than {tolerance} of its size: "
    "below {limit}",
    fix="record the shaped reward (`shaped_reward`), or remove the hidden step",
    source="own identity",
    explains=MISLED,
    windows=True,
    absent=no_token_rewards,
)
def reward_accounting(data: RunData, *, limit: float = Share(0.02), tolerance: float = Share(0.01)) -> Reading | None:
    sample = data.sample
    if recorded_white(data):
        return None
    rest = without_penalty(data, sample)
    total = sample.total(np.where(sample.trained, rest, 0.0))
    score = sample.rows.trained_reward
    there = np.isfinite(total) & np.isfinite(score) & (sample.length > 0)
    if may_follow(data):
        total = total + np.bincount(sample.line, np.where(sample.behind, np.nan_to_num(rest), 0.0), len(total))
        there &= np.abs(total) > tolerance  # a score that follows may not have been recorded
    if not there.any():
        return None
    miss = np.abs(total - score) / (np.abs(score) + 1)
    wrong = there & (miss > tolerance)
    share, unhealthy = Share(wrong.sum() / there.sum()), exceeds(data, wrong.sum(), there.sum(), limit)
    words = {"size": float(np.median(np.abs(total - score)[wrong])) if wrong.any() else 0.0}
    worst = sample.rows.evidence(np.flatnonzero(wrong)[np.argsort(-miss[wrong])])
    curve = Curve(sample.rows.by_step(wrong.astype(float)), high=limit)
    return Reading(share, unhealthy, earliest(sample.rows.step[wrong]), worst, words, curve)


@rule(
    number=76,
    needs=["tokens.token_reward"],
    severity="error",
    min_steps=5,
    traits=["critic"],
    title="Whitening takes the mean off the token rewards",
    cause="The token rewards are whitened, and in {seen} of the steps their mean is 0, more exactly than by chance: "
    "the whitening subtracts the mean of the step. Besides its penalty and score, every token {effect}.",
    healthy="share of steps in which the mean of the whitened token rewards is 0 within {exact} standard errors: a "
    "few, below {limit}",
    fix="scale rewards without moving their mean: whiten(rewards, shift_mean=False)",
    source="The N implementation details of RLHF with PPO (reward whitening); the code of 1909.08593",
    explains=["length-exploited", "never-ends", "value-start", *MISLED],
    absent=not_whitened,
)
def rewards_shifted(data: RunData, *, limit: float = Share(0.9), exact: float = 0.05) -> Reading | None:
    sample, reward = data.sample, data.sample["token_reward"]
    points = _means_in_errors(data)
    if not len(points):
        return None
    bad = points.value < exact
    first = since(points, bad, 3)
    inner = float(np.nanmedian(reward[sample.trained & ~sample.last]))
    costs, earns = "costs a constant, so that long responses lose", "earns a constant, so that long responses gain"
    effect = Phrase(costs if inner < 0 else earns)
    curve = Curve(points, low=exact, name=Phrase("mean of the whitened token rewards, in standard errors"))
    evidence = data.step_evidence(points.step[bad])
    return Reading(Share(bad.mean()), bool(bad.mean() > limit), first, evidence, {"effect": effect}, curve)


def _means_in_errors(data: RunData) -> Series:
    """Return how far the mean of the whitened token rewards of each step is from 0, in standard errors.

    Without a shift, rewards keep their mean: r/σ + μ·(1 − 1/σ). TRL whitens the token behind the last one, too, on
    which the score may be.
    """
    sample, reward = data.sample, data.sample["token_reward"]
    whitened = (sample.trained | sample.behind) & np.isfinite(reward)
    step, values = sample.step[whitened], reward[whitened]
    if not are_white(sample):
        if not recorded_white(data) or np.any(sample.behind & whitened):
            return series(np.zeros(0), np.zeros(0))
        more_steps, more = _scores_behind(data)
        inside = np.isin(step, more_steps)
        step, values = np.append(step[inside], more_steps), np.append(values[inside], more)
    points, count = mean_by_step(step, values), np.unique(step, return_counts=True)[1]
    return Series(points.step, np.abs(points.value) * np.sqrt(count))  # the variance is 1


def _scores_behind(data: RunData) -> tuple[Array, Array]:
    """Return the steps and the whitened rewards of tokens behind the last ones, which were not recorded.

    The other tokens of a step show how it was whitened: w = a·r + c, where r is the penalty, and the score as well if
    it is on the last token. If it is not, it is behind: a·score + c.
    """
    sample, white = data.sample, data.sample["token_reward"]
    score = sample.rows.trained_reward[sample.line]
    spent = -sample.rows["kl_coef"][sample.line] * penalty(data, sample)
    known = sample.trained & np.isfinite(spent + white)
    steps, behind = [np.zeros(0)], [np.zeros(0)]
    for at in sample.rows.steps:
        of_step = known & (sample.step == at)
        inner, last = of_step & ~sample.last, of_step & sample.last
        if inner.sum() < MIN_INNER:
            continue
        columns = np.stack([spent[inner], np.ones(inner.sum())], axis=1)
        scale, offset = least_deviations(columns, white[inner])
        if ROUNDED * abs(offset) >= SCALE * abs(scale) * np.std(spent[inner]) * np.sqrt(inner.sum()):
            continue  # next to no penalty: its rounding hides the scale
        with_score = scale * score[last]
        lacks = np.abs(white[last] - scale * spent[last] - offset) < np.abs(with_score) / 2
        steps.append(np.full(lacks.sum(), at))
        behind.append(with_score[lacks] + offset)
    return np.concatenate(steps), np.concatenate(behind)
