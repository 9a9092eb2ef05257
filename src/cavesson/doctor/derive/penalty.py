"""The KL penalty, from token rewards and log-ratios: they are proportional on all tokens but the one with the score."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cavesson.doctor.derivation import DerivedValues, derivation
from cavesson.doctor.derive.critic import recorded_white
from cavesson.doctor.groups import mean_of
from cavesson.doctor.recorded import RecordedData
from cavesson.doctor.rows import Rows
from cavesson.doctor.sample import Sample
from cavesson.doctor.series import Array
from cavesson.findings.kl import estimates
from cavesson.sorted_arrays import are_first

MATCHED = 0.9
"""Smallest share of the tokens that the penalty must explain."""
MARGIN = 0.02
"""Share of the tokens that no other estimator may explain as well."""
TOLERANCE = 0.02
"""Relative difference at which a token reward still equals β times the estimate."""
ROUNDED = 2.0**-10
"""Relative error of a recorded advantage, at most."""
SMALLEST = 1e-4
"""Nats below which the rounding of log-probabilities hides the penalty."""
ROUNDS = 20
"""Rounds of the robust regression."""
MIN_TOKENS = 8
"""Tokens from which the coefficient of a step is estimated."""


class Fit(NamedTuple):
    """How well a token's penalty is −β times an estimate of the KL."""

    matched: float
    """Share of the tokens with a clear estimate whose reward is −β times it."""
    steps: Array
    beta: Array
    """Of each step; negative if the sign of the penalty is wrong."""
    matched_by_step: Array
    """Share of the tokens of each step, as ``matched``."""


@derivation(
    gives=["rows.kl_coef", "info.kl.estimator", "info.kl.place"],
    needs=[
        "tokens.token_reward|rows.advantage",
        "tokens.token_reward|rows.reward",
        "tokens.token_reward|rows.group",
        "tokens.logprob",
        "tokens.ref_logprob",
    ],
    how="token rewards or advantages beside log-ratios; its size, not its sign",
)
def kl_penalty(data: RecordedData) -> DerivedValues:
    if data.traits.get("kl_place", "unknown") is None:
        return {"rows.kl_coef": lambda rows: np.zeros(len(rows))}
    fits = _of_token_rewards(data.sample) if data.has("tokens.token_reward") else of_advantages(data.sample)
    name = clear(fits)
    if name is None or recorded_white(data):
        return None
    well = fits[name].matched_by_step >= MATCHED  # of the others, something else is true as well
    steps, beta = fits[name].steps[well], np.abs(fits[name].beta[well])

    def coefficient(rows: Rows) -> Array:
        return np.interp(rows.step, steps, beta)

    return {"rows.kl_coef": coefficient, "info.kl.estimator": name, "info.kl.place": "reward"}


@derivation(
    gives=["rows.penalised_advantage"],
    needs=["info.kl.place", "info.kl.estimator", "rows.advantage", "rows.reward", "rows.group"],
    how="the penalty is part of the reward, and a response has one advantage",
)
def penalised_advantages(data: RecordedData) -> DerivedValues:
    def column(rows: Rows) -> Array:
        return rows["advantage"]

    return {"rows.penalised_advantage": column} if data.setting("kl.place") == "reward" else None


def clear(fits: Mapping[str, Fit]) -> str | None:
    """Return the estimator that fits, if no other one fits nearly as well: where all Δ are positive, k1 is |Δ|."""
    (name, best), (_, second), *_ = sorted(fits.items(), key=lambda item: -item[1].matched)
    missed = 1 - best.matched
    return name if best.matched >= MATCHED and best.matched - second.matched > 2 * missed + MARGIN else None


def _of_token_rewards(sample: Sample) -> dict[str, Fit]:
    inner = sample.trained & ~sample.last & np.isfinite(sample["token_reward"]) & np.isfinite(sample["kl_k1"])
    inner &= ~_largest(sample, np.where(inner, np.abs(sample["token_reward"]), -1.0))
    step, line, reward = sample.step[inner], sample.line[inner], sample["token_reward"][inner]
    spent = estimates(sample["kl_k1"][inner])
    fits = {name: _fit(step, values, reward) for name, values in spent.items()}
    if clear(fits) is not None:
        return fits
    # Each token of a response may have the same reward as well.
    apart = reward - mean_of(line, reward)
    return {name: _fit(step, values - mean_of(line, values), apart) for name, values in spent.items()}


def _largest(sample: Sample, size: Array) -> Array:
    """Return [N] which token of each response has the largest of the sizes [N]: the score may be there."""
    order = np.lexsort((size, sample.line))
    ends = np.flatnonzero(np.diff(sample.line[order], append=-1))
    found = np.zeros(len(sample), bool)
    found[order[ends]] = True
    return found


def of_advantages(sample: Sample) -> dict[str, Fit]:
    """Fit advantage = a·(reward − β·ΣKL − mean of the others of the group) in each step, as RLOO has it.

    Source: 2402.14740, section 2.
    """
    rows, group = sample.rows, sample.rows.group
    reward = rows.trained_reward - mean_of(group, rows.trained_reward)
    advantage = rows["advantage"] - mean_of(group, rows["advantage"])  # only a wrong baseline leaves more than 0
    found = {}
    for name, values in estimates(sample["kl_k1"]).items():
        spent = sample.total(values)
        spent = spent - mean_of(group, spent)
        known = np.isfinite(advantage + reward + spent)
        found[name] = _fit_groups(rows.step[known], reward[known], spent[known], advantage[known])
    return found


def _fit_groups(step: Array, reward: Array, spent: Array, advantage: Array) -> Fit:
    """Return the coefficient of each step in which reward and penalty explain the advantages."""
    steps, betas, matched = [], [], []
    for at in np.unique(step):
        columns, goal = np.stack([reward, spent], 1)[step == at], advantage[step == at]
        if len(goal) < MIN_TOKENS or np.std(columns[:, 1]) < SMALLEST or np.linalg.matrix_rank(columns) < 2:
            continue
        scale, of_spent = least_deviations(columns, goal)
        size = float(np.std(of_spent * columns[:, 1]))
        if size < 10 * ROUNDED * np.std(goal):
            continue  # the penalty is hidden by the rounding of the advantages
        matched.append(np.abs(columns @ (scale, of_spent) - goal) <= TOLERANCE * size + ROUNDED * np.abs(goal))
        steps.append(at)
        betas.append(-of_spent / scale)
    return _joined(steps, betas, matched)


def least_deviations(columns: Array, goal: Array) -> Array:
    """Return the coefficients [k] for which the absolute differences of ``columns`` [n, k] from ``goal`` are smallest.

    A few rows in which something else holds do not change them. By iteratively reweighted least squares
    (doi:10.1080/03610927708827533).
    """
    weight = np.ones(len(goal))
    smallest = 1e-6 * float(np.abs(goal).max(initial=1e-300))
    for _ in range(ROUNDS):
        found, *_ = np.linalg.lstsq(columns * weight[:, None], goal * weight, rcond=None)
        weight = 1 / np.sqrt(np.maximum(np.abs(columns @ found - goal), smallest))
    return np.asarray(found)


def _fit(step: Array, estimate: Array, reward: Array) -> Fit:
    """Return the coefficient of each step whose estimates are large enough, by the median of the tokens' ratios.

    The steps [N] are ascending.
    """
    steps, betas, matched = [], [], []
    begin = np.flatnonzero(are_first(step))
    for at, x, y in zip(step[begin], *(np.split(values, begin[1:]) for values in (estimate, reward)), strict=True):
        large = np.abs(x) >= max(float(np.median(np.abs(x))), SMALLEST)
        if large.sum() < MIN_TOKENS:
            continue
        beta = -float(np.median(y[large] / x[large]))
        expected = -beta * x[large]
        matched.append(np.abs(y[large] - expected) <= TOLERANCE * np.abs(expected))
        steps.append(at)
        betas.append(beta)
    return _joined(steps, betas, matched)


def _joined(steps: Sequence[int], betas: Sequence[float], matched: Sequence[Array]) -> Fit:
    share = float(np.mean(np.concatenate(matched))) if matched and np.all(np.abs(betas) > 0) else 0.0
    by_step = np.array([some.mean() for some in matched], np.float64)
    return Fit(share, np.array(steps, np.float64), np.array(betas, np.float64), by_step)
