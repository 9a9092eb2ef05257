"""What the token rewards of a response hold: the penalty, the score, and the returns that a critic predicts."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.derive.critic import recorded_white, scales
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array
from cavesson.findings.kl import estimate


def penalty(data: RunData, sample: Sample) -> Array:
    """Return [N] the KL estimates that β multiplies, by the run's estimator; NaN if it is not known, or is exact."""
    return estimate(str(data.setting("kl.estimator")), sample["kl_k1"], np.nan)


def without_penalty(data: RunData, sample: Sample) -> Array:
    """Return [N] the token rewards plus β·KL: the score, where it stands, and 0 elsewhere."""
    coef = sample.rows["kl_coef"][sample.line]
    spent = np.where(coef == 0, 0.0, penalty(data, sample))
    return np.asarray(sample["token_reward"] + coef * np.where(sample.trained, spent, 0.0))


def turn_rewards(data: RunData) -> Array:
    """Return [N] what environments gave for turns, on the last tokens of these; 0 on other tokens."""
    sample, turns = data.sample, data.turns
    found = np.zeros(len(sample))
    if not turns.recorded("reward"):
        return found
    place = turns["first_token"] + turns["tokens"] - 1
    given = np.isfinite(turns["reward"] + place) & (turns["tokens"] > 0)
    at = np.searchsorted(sample.line, turns.line[given]) + place[given].astype(np.int64)
    is_there = (at < len(sample)) & (sample.line[np.minimum(at, len(sample) - 1)] == turns.line[given])
    found[at[is_there]] = turns["reward"][given][is_there]
    return found


def may_follow(data: RunData) -> bool:
    """Return whether the score may be on the token after the last one: TRL puts it there, and its returns have it."""
    return not data.recorded("info.config") or str(data.setting("trainer", "")).startswith("trl")


def reward_behind(data: RunData, sample: Sample) -> Array:
    """Return [n] the reward on the token after the last trained one, where a score may follow; NaN if not known.

    A record without these tokens lacks the scores of the responses whose token rewards do not add up to them.
    """
    if not may_follow(data):
        return np.zeros(len(sample.rows))
    here = sample.behind & np.isfinite(sample["token_reward"])
    if here.any():
        return np.bincount(sample.line[here], sample["token_reward"][here], len(sample.rows))
    if recorded_white(data):
        return np.full(len(sample.rows), np.nan)  # the score has another scale there
    rest, score = without_penalty(data, sample), sample.rows.trained_reward
    total = sample.total(np.where(np.isfinite(rest), rest, sample["token_reward"]))
    return np.where(np.abs(total - score) <= np.abs(total), 0.0, score)


def returns(data: RunData, sample: Sample) -> Array:
    """Return [N] the actual returns: the discounted sum of the rewards from each token on.

    The recorded return is the critic's target, which depends on the critic's own estimates if λ < 1.
    """
    gamma = float(data.setting("config.ppo.gamma", 1.0))
    rewards = np.where(sample.trained, _added_up(data, sample), 0.0)
    behind = reward_behind(data, sample) + np.nan_to_num(sample.rows["next_value"])  # where a limit has cut
    rewards[sample.last] += gamma * behind[sample.line[sample.last]]
    found = np.zeros(len(sample))
    following, line = 0.0, -1
    for i in range(len(sample) - 1, -1, -1) if gamma != 1 else ():
        following = rewards[i] + gamma * (following if sample.line[i] == line else 0.0)
        found[i], line = following, sample.line[i]
    if gamma == 1:
        known = np.isfinite(sample.total(rewards))[sample.line]  # otherwise, one unknown reward makes all later sums so
        total = np.cumsum(np.where(known, rewards, 0.0))
        end = np.searchsorted(sample.line, sample.line, side="right") - 1
        found = np.where(known, total[end] - total + rewards, np.nan)
    return np.where(sample.trained, found, np.nan)


def _added_up(data: RunData, sample: Sample) -> Array:
    """Return [N] the token rewards that returns add up, whitened if they are recorded as before; NaN if not known."""
    reward = sample["token_reward"]
    if not data.setting("config.ppo.whiten_rewards") or recorded_white(data):
        return reward
    if not (data.has("tokens.return") and data.has("tokens.value")):
        return np.full(len(sample), np.nan)
    scale, offset = (np.interp(sample.step, sample.rows.steps, one) for one in scales(sample))
    return np.asarray(scale * reward + offset)
