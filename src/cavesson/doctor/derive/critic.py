"""γ, λ and whitening, from values, token rewards, returns and advantages."""

from collections.abc import Sequence

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array, Series

MIN_TOKENS, MIN_STEPS = 40, 3
ERROR = 0.01
"""Largest standard error of γ and λ, from their differences between steps."""
FEW_TOKENS = 4
"""Minimum number of tokens of a response whose own mean and standard deviation are compared."""
ALONE, SHARE_ALONE = 0.05, 0.9
"""Largest difference of these from 0 and 1, and share of the responses for which it must be so small."""
SCALE = 0.01
"""Relative difference from 1 from which returns add up other rewards than those recorded."""
LEFT = 1e-4
"""Largest share of the variance that an exact identity leaves, because columns are rounded."""
APART = 5e-3
"""Smallest singular value of standardised columns, relative to the largest, that is not a matter of rounding."""


@derivation(
    gives=["info.config.ppo.gamma", "info.config.ppo.lam"],
    needs=["tokens.value", "tokens.token_reward", "tokens.return|tokens.advantage"],
    how="the recursion of returns or advantages from token to token",
)
def discount_and_trace(data: RecordedData) -> DerivedValues:
    sample = data.sample
    this = _followed(sample)
    of_step = _from_returns if sample.has("return") else _from_advantages
    found = [of_step(sample, this[sample.step[this] == step]) for step in np.unique(sample.step[this])]
    known = np.array([one for one in found if one is not None])
    if len(known) < MIN_STEPS:
        return None
    gamma, lam = np.median(known, 0).tolist()
    spread = 1.4826 * np.median(np.abs(known - (gamma, lam)), 0) / np.sqrt(len(known))
    return None if max(spread) > ERROR else {"info.config.ppo.gamma": gamma, "info.config.ppo.lam": lam}


def _from_returns(sample: Sample, at: Array) -> tuple[float, float] | None:
    """Return γ and λ of a step from its returns."""
    fitted = _recursion(sample, at)
    if fitted is None or fitted[0] + fitted[1] <= 0:
        return None
    gamma = float(fitted[0] + fitted[1])
    return gamma, float(fitted[1]) / gamma


def _recursion(sample: Sample, at: Array) -> Array | None:
    """Return γ(1 − λ), γλ, a and c in Rₜ = a·rₜ + c + γ(1 − λ)·Vₜ₊₁ + γλ·Rₜ₊₁; a and c are those of whitened rewards.

    It follows from Rₜ = Aₜ + Vₜ and Schulman et al. 1506.02438, (16). Where all r are equal, as without a penalty, a is
    NaN and c contains a·r.
    """
    goal, reward = sample["return"][at], sample["token_reward"][at]
    columns = (sample["value"][at + 1], sample["return"][at + 1])
    if np.any(reward != reward[:1]):
        return _fitted((*columns, reward), goal)
    fitted = _fitted(columns, goal)
    return None if fitted is None else np.insert(fitted, 2, np.nan)


def scales(sample: Sample) -> tuple[Array, Array]:
    """Return [S] a and c by step if returns add up a·r + c, r being the recorded token rewards; NaN if not known."""
    this = _followed(sample)
    found = [_recursion(sample, this[sample.step[this] == step]) for step in sample.rows.steps]
    scale, offset = np.array([(np.nan, np.nan) if one is None else one[2:] for one in found]).reshape(-1, 2).T
    return scale, offset


def _followed(sample: Sample) -> Array:
    """Return the places of the trained tokens that a trained token of the same response follows."""
    return np.flatnonzero(sample.trained[:-1] & sample.trained[1:] & (sample.line[:-1] == sample.line[1:]))


def _from_advantages(sample: Sample, at: Array) -> tuple[float, float] | None:
    """Return γ and λ of a step, from rₜ − Vₜ = σ·Âₜ − γ·Vₜ₊₁ − γλσ·Âₜ₊₁ + c; σ and c undo a whitening of A."""
    columns = (sample["advantage"][at], sample["value"][at + 1], sample["advantage"][at + 1])
    fitted = _fitted(columns, (sample["token_reward"] - sample["value"])[at])
    if fitted is None or fitted[0] <= 0 or fitted[1] >= 0:
        return None
    scale, of_value, of_next, _ = fitted.tolist()
    return -of_value, of_next / (of_value * scale)


@derivation(
    gives=["info.config.ppo.whiten_rewards"],
    needs=["tokens.token_reward"],
    how="the variance of the token rewards of each step, and what the returns add up",
)
def rewards_whitened(data: RecordedData) -> DerivedValues:
    sample = data.sample
    if len(sample.rows.steps) < MIN_STEPS:
        return None
    beside = scales(sample)[0] if data.has("tokens.return") and data.has("tokens.value") else np.full(1, np.nan)
    known = beside[np.isfinite(beside)]
    later = len(known) >= MIN_STEPS and bool(np.all(np.abs(known - 1) > SCALE))
    return {"info.config.ppo.whiten_rewards": later or are_white(sample)}


def recorded_white(data: RecordedData) -> bool:
    """Return whether the recorded token rewards are the whitened ones: TRL's are, Cavesson's are as before."""
    of_trl = str(data.setting("trainer", "")).startswith("trl")
    return bool(data.setting("config.ppo.whiten_rewards")) and (of_trl or are_white(data.sample))


def are_white(sample: Sample) -> bool:
    """Return whether the token rewards have a variance of 1 in each step."""
    # TRL whitens the token behind the last one, too, which has the score.
    variance = sample.variance_by_step(sample["token_reward"], sample.trained | sample.behind).value
    # One step can have a variance of 1 by chance, but not nearly all of them.
    return bool(len(variance)) and bool(np.quantile(np.abs(variance - 1), 0.9) <= 0.05)


@derivation(
    gives=["info.config.ppo.whiten_advantages"],
    needs=["tokens.advantage", "tokens.return", "tokens.value"],
    how="the recorded advantages beside returns − values",
)
def advantages_whitened(data: RecordedData) -> DerivedValues:
    sample = data.sample
    alone = whitened_alone(sample, sample["advantage"]).value
    if len(alone) and np.median(alone) > SHARE_ALONE:  # along the wrong axis, but whitened
        return {"info.config.ppo.whiten_advantages": True}
    steps = np.unique(sample.step)
    found = []
    for step in steps:
        at = np.flatnonzero(sample.trained & (sample.step == step))
        fitted = _fitted(((sample["return"] - sample["value"])[at],), sample["advantage"][at])
        if fitted is not None:
            found.append(fitted)
    if len(found) < 0.9 * len(steps):
        return None
    slope, offset = np.array(found).T
    if np.all(np.abs(slope - 1) < 0.01) and np.all(np.abs(offset) < 0.01):
        return {"info.config.ppo.whiten_advantages": False}
    # Whitening divides every step by its own standard deviation; a constant factor is only a scale.
    return {"info.config.ppo.whiten_advantages": True} if np.std(slope) > 0.01 * abs(np.mean(slope)) else None


def whitened_alone(sample: Sample, advantage: Array) -> Series:
    """Return by step the share of the responses of which the advantages [N] alone have mean 0 and deviation 1."""
    there = sample.trained & np.isfinite(advantage)
    line, size = sample.line[there], len(sample.rows)
    count = np.maximum(np.bincount(line, minlength=size), 1)
    mean = np.bincount(line, advantage[there], size) / count
    sd = np.sqrt(np.bincount(line, (advantage[there] - mean[line]) ** 2, size) / count)
    alone = (np.abs(mean) < ALONE) & (np.abs(sd - 1) < 2 * ALONE)
    return sample.rows.by_step(np.where(count >= FEW_TOKENS, alone, np.nan))


def _fitted(columns: Sequence[Array], goal: Array) -> Array | None:
    """Return the least-squares coefficients of columns and of 1; None if they do not explain the goal exactly.

    None, too, if the columns do not determine them but for their rounding, as values that are the returns + a constant.
    """
    matrix = np.stack([*columns, np.ones(len(goal))], 1)
    known = np.isfinite(matrix).all(1) & np.isfinite(goal)
    matrix, goal = matrix[known], goal[known]
    if len(goal) < MIN_TOKENS or not _are_independent(matrix[:, :-1]):
        return None
    coefficients = np.linalg.lstsq(matrix, goal, rcond=None)[0]
    is_exact = np.var(goal - matrix @ coefficients) <= LEFT * np.var(goal)
    return coefficients if is_exact else None


def _are_independent(columns: Array) -> bool:
    """Return whether no column [n, k] is a sum of the others and a constant, but for rounding."""
    spread = columns.std(0)
    if not spread.all():
        return False
    sizes = np.linalg.svd((columns - columns.mean(0)) / spread, compute_uv=False)
    return bool(sizes[-1] > APART * sizes[0])
