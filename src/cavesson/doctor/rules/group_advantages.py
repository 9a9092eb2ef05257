"""The rule on the advantages of groups, which the rewards of the responses to a prompt determine."""

from collections.abc import Sequence

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.estimates import estimates
from cavesson.doctor.finding import Curve, Phrase, Reading, Share
from cavesson.doctor.groups import mean_of, repeated
from cavesson.doctor.rule import rule
from cavesson.doctor.rules.consequences import RUNAWAY
from cavesson.doctor.series import Array, series, since

EXACT = 1e-4
"""Share of the variance of a group's advantages that rounding leaves where they follow from its rewards."""
SETTLED = 5
"""Steps without anything else from which every later step is judged."""
KNOWN = 0.9
"""Share of the groups of a step that must be exact: elsewhere, advantages contain something that is not recorded."""


@rule(
    number=72,
    needs=["rows.advantage", "rows.reward", "rows.group"],
    severity="error",
    min_steps=5,
    title="Advantages are not relative to their group",
    cause="An advantage is a reward minus the mean of its group or step, in units that its group or step share. {seen} "
    "of the variance of the advantages within a step is something else{how}.",
    healthy="share of the variance of the advantages within a step that rewards minus means do not explain: 0, at most "
    "{limit}",
    fix="check that the responses to a prompt stand next to each other, and what is subtracted and divided by: the "
    "mean and standard deviation of the group (GRPO), or the mean of the other responses (RLOO)",
    source="GRPO 2402.03300, section 4.1; RLOO 2402.14740, section 3.2; Dr. GRPO 2503.20783; TRL's loss types",
    explains=["update-kl-large", "clip-fraction-high", "kl-explosion", *RUNAWAY],
)
def group_advantages(data: RunData, *, limit: float = Share(0.001)) -> Reading | None:
    rows = data.sample.rows
    signal, advantage = _signal(data), rows["advantage"]
    used = _comparable(rows.group, signal, advantage)
    if not repeated(rows) or not used.any():
        return None
    mixed = signal - _tiled_means(data, signal)
    step, group, signal, advantage, mixed = (one[used] for one in (rows.step, rows.group, signal, advantage, mixed))
    of_mixed = _left(step, [mixed, mixed / _spread(group, signal)], advantage)
    judged = (of_mixed <= limit) | (_exact(step, group, signal, advantage) >= KNOWN)
    left = _left(step, _forms(step, group, signal), advantage)
    # Once rewards have explained all advantages for some steps, whatever else they contain later is new.
    judged |= np.cumsum(judged & (left <= limit)) >= SETTLED
    left = np.where(judged, left, np.nan)
    points = series(np.unique(step), left)
    if len(points) < 5:
        return None
    bad = points.value > limit
    first = since(points, bad, 3)
    how = ""
    if first is not None and _covariance(group, signal, advantage)[group[step >= first]].sum() < 0:
        how = ": it falls where the reward rises"
    elif np.mean(of_mixed <= limit) > np.mean(left <= limit):
        how = ": the mean of another prompt's group, as if the groups were interleaved"
    seen = Share(np.median(points.after(first).value))
    evidence = data.step_evidence(points.step[bad])
    return Reading(seen, first is not None, first, evidence, {"how": Phrase(how)}, Curve(points, high=limit))


def _signal(data: RunData) -> Array:
    """Return [n] what advantages are computed from: the shaped reward, minus the KL penalty if that is part of it."""
    sample = data.sample
    rows = sample.rows
    reward = rows.trained_reward
    if data.setting("kl.place") != "reward" or not rows.has("kl_coef"):
        return reward
    spent = sample.total(estimates(sample["kl_k1"])[data.setting("kl.estimator")])
    return np.asarray(reward - np.where(rows["kl_coef"] == 0, 0.0, rows["kl_coef"] * spent))


def _comparable(group: Array, signal: Array, advantage: Array) -> Array:
    """Return [n] whether a rollout is of a group of the usual size, at least 3, all known, whose rewards differ."""
    size, known = np.bincount(group), np.bincount(group, np.isfinite(signal + advantage))
    whole = (size == known) & (size >= 3)
    usual = np.argmax(np.bincount(size[whole])) if whole.any() else 0
    used = (whole & (size == usual))[group]
    spread = np.where(used, _spread(group, signal), 0.0)
    return np.asarray(spread > 0.01 * np.median(spread[spread > 0])) if np.any(spread > 0) else spread > 0


def _spread(group: Array, signal: Array) -> Array:
    """Return [n] the standard deviation of the group of each rollout."""
    return np.sqrt(mean_of(group, (signal - mean_of(group, signal)) ** 2))


def _covariance(group: Array, one: Array, other: Array) -> Array:
    """Return [g] the sums of products of two columns, each minus its group mean."""
    return np.bincount(group, (one - mean_of(group, one)) * (other - mean_of(group, other)))


def _exact(step: Array, group: Array, signal: Array, advantage: Array) -> Array:
    """Return [S] the share of the groups of each step in which the advantage is a linear function of the reward."""
    _, at, group = np.unique(group, return_index=True, return_inverse=True)
    of_signal, of_both, of_advantage = (
        _covariance(group, one, other) for one, other in ((signal, signal), (signal, advantage), (advantage, advantage))
    )
    is_exact = of_advantage - of_both**2 / of_signal <= EXACT * of_advantage
    of_step = np.unique(step[at], return_inverse=True)[1]
    return np.asarray(np.bincount(of_step, is_exact) / np.bincount(of_step))


def _forms(step: Array, group: Array, signal: Array) -> list[Array]:
    """Return the usual forms of an advantage, each [n], up to a scale and an offset of the step."""
    spread = _spread(group, signal)
    of_step = np.unique(step, return_inverse=True)[1]
    in_group, in_step = signal - mean_of(group, signal), signal - mean_of(of_step, signal)
    return [in_group, in_group / spread, in_step, in_step / spread]


def _tiled_means(data: RunData, signal: Array) -> Array:
    """Return [n] the group means of each step one after the other, again and again; NaN if the step is incomplete."""
    rows = data.sample.rows
    means, found = mean_of(rows.group, signal), np.full(len(rows), np.nan)
    for step in rows.steps:
        at = np.flatnonzero(rows.step == step)
        groups = np.sort(np.unique(rows.group[at], return_index=True)[1])  # as they stand in the step
        if len(at) % len(groups) == 0 and len(at) == np.sum(data.rows.step == step):
            found[at] = np.tile(means[at][groups], len(at) // len(groups))
    return found


def _left(step: Array, forms: Sequence[Array], advantage: Array) -> Array:
    """Return [S] the share of the variance of each step's advantages that the best of some forms leaves."""
    return np.asarray(np.min([_unexplained(step, form, advantage) for form in forms], axis=0))


def _unexplained(step: Array, form: Array, advantage: Array) -> Array:
    """Return [S] the share of the variance of each step's advantages that a positive multiple of a form leaves."""
    of_step = np.unique(step, return_inverse=True)[1]
    of_form, of_both, of_advantage = (
        _covariance(of_step, one, other) for one, other in ((form, form), (form, advantage), (advantage, advantage))
    )
    explained = np.maximum(of_both, 0.0) ** 2 / of_form
    return np.asarray(1 - explained / of_advantage)
