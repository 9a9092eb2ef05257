"""Rules on identities of token rewards: the penalty, the score, and their positions."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Phrase, Reading, Share, Words
from cavesson.doctor.readings import exceeds
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import CRITIC, RUNAWAY
from cavesson.doctor.rules.returns import may_follow, penalty, without_penalty
from cavesson.doctor.series import Array, earliest, slope_by_step, standard_error

PENALTY = ("tokens.token_reward", "tokens.logprob", "tokens.ref_logprob", "rows.kl_coef")
"""What shows the penalty of each token."""
CLEAR = 3.0
"""Standard errors by which the coefficient of the penalty must be off."""


@rule(
    number=5,
    needs=PENALTY,
    severity="error",
    title="The KL penalty has the wrong sign or size",
    cause="Except on its last token, a response's token reward is −β·KL. Regressed on the recorded log-ratios, it "
    "gives β = {found}, while the run's β is {beta}{flipped}.",
    healthy="β from the token rewards divided by the β of the run: {low} to {high}",
    fix="compute the penalty as −β·(log π − log π_ref) on the response's own tokens; test it on two tokens by hand",
    source="OpenAI's flipped sign (Fine-tuning GPT-2 from human preferences); Schulman, Approximating KL divergence",
    explains=["kl-explosion", "reward-accounting", "negative-kl", "kl-flat", *RUNAWAY],
    windows=True,
)
def penalty_wrong(data: RunData, *, low: float = 0.95, high: float = 1.05) -> Reading | None:
    sample = data.sample
    if data.setting("config.ppo.whiten_rewards"):
        return None  # whitening divides the penalty by a number that differs from step to step
    spent = penalty(data, sample)
    coef = sample.rows["kl_coef"][sample.line]
    inner = sample.trained & ~sample.last & np.isfinite(spent) & np.isfinite(sample["token_reward"]) & (coef > 0)
    if inner.sum() < 50 or np.std((coef * spent)[inner]) < 1e-6:
        return None
    expected, seen = (coef * spent)[inner], sample["token_reward"][inner]
    slopes = -_slopes(expected, seen)
    found = float(np.median(slopes))
    # Other rewards on these tokens, such as those of single steps of a solution, make the slope uncertain.
    error = CLEAR * standard_error(slopes) if len(slopes) > 1 else 0.0
    beta = float(np.median(coef[inner]))
    flipped = Phrase(
        ": the sign is flipped, so the policy is rewarded for moving away from the reference" if found < 0 else ""
    )
    worst = sample.worst(np.where(inner, np.abs(sample["token_reward"] + coef * spent), np.nan))
    words: Words = {"found": found * beta, "beta": beta, "flipped": flipped}
    curve = Curve(slope_by_step(sample.step[inner], expected, -seen), low, high)
    sick = found + error < low or found - error > high
    return Reading(found, sick, int(sample.rows.steps[0]), worst, words, curve)


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
    explains=["reward-accounting", "penalty-wrong", *CRITIC],
    windows=True,
)
def reward_position(data: RunData, *, limit: float = Share(0.03)) -> Reading | None:
    sample = data.sample
    if data.setting("config.ppo.whiten_rewards"):
        return None  # whitening changes all token rewards
    rest, score = without_penalty(data, sample), sample.rows.trained_reward[sample.line]
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
    share, sick = Share(wrong.sum() / len(there)), exceeds(data, wrong.sum(), len(there), limit)
    curve = Curve(sample.rows.by_step(wrong.astype(float)), high=limit)
    return Reading(share, sick, earliest(sample.rows.step[wrong]), sample.spans(elsewhere), curve=curve)


@rule(
    number=7,
    needs=[*PENALTY, "rows.reward|rows.shaped_reward"],
    severity="error",
    title="The token rewards do not add up to the reward",
    cause="The token rewards of a response should add up to its reward − β·KL. In {seen} of the responses they do not, "
    "by {size} in the median: an unrecorded step clips, scales, whitens or drops a part.",
    healthy="share of responses whose token rewards differ from reward − β·KL by more than {tolerance} of its size: "
    "below {limit}",
    fix="record the shaped reward (`shaped_reward`), or remove the hidden step",
    source="own identity",
    explains=CRITIC,
    windows=True,
)
def reward_accounting(data: RunData, *, limit: float = Share(0.02), tolerance: float = Share(0.01)) -> Reading | None:
    sample = data.sample
    if data.setting("config.ppo.whiten_rewards"):
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
    share, sick = Share(wrong.sum() / there.sum()), exceeds(data, wrong.sum(), there.sum(), limit)
    words = {"size": float(np.median(np.abs(total - score)[wrong])) if wrong.any() else 0.0}
    worst = sample.rows.evidence(np.flatnonzero(wrong)[np.argsort(-miss[wrong])])
    curve = Curve(sample.rows.by_step(wrong.astype(float)), high=limit)
    return Reading(share, sick, earliest(sample.rows.step[wrong]), worst, words, curve)
