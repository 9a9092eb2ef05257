"""The rule on the advantages of groups, which the rewards of the responses to a prompt determine."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.groups import mean_of, repeated
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.rule import Disproof, rule
from cavesson.doctor.rules.consequences import RUNAWAY
from cavesson.doctor.series import Array, series, since
from cavesson.findings.kl import estimate
from cavesson.findings.words import Phrase, Share

EXACT = 1e-4
"""Share of the variance of a group's advantages that rounding leaves where they follow from its rewards."""
SETTLED = 5
"""Steps without anything else from which every later step is judged."""
SUDDEN = 0.05
"""Share of the mean square of the advantages that something else makes, at the first step with more than the limit."""
TIE = 1e-3
"""Standard deviations of its group by which two advantages, or two rewards, are the same."""
SOME = 0.2
"""Share of the groups of a step in which rewards must be tied to be called clipped."""
KEPT = 0.2
"""Share of the mean square of the advantages of a step from which their mean is not what weights or rounding leave."""
KNOWN = 0.9
"""Share of the groups of a step that must be exact: elsewhere, advantages contain something that is not recorded."""
HOW = (
    Phrase(": it falls where the reward rises"),
    Phrase(": the mean of another prompt's group, as if the groups were interleaved"),
    Phrase(": they stand in another order than the responses, so that each response has that of another one"),
    Phrase(": different rewards have the same advantage, as if rewards were clipped first"),
    Phrase(": some have the wrong sign"),
    Phrase(": their mean is far from 0, so that what was subtracted is not the mean of the rewards"),
)
OTHER_BASELINE = Phrase(
    "the algorithm has a baseline that is not the mean of a group or step, and the record does not have it"
)
UNLESS = Phrase(", unless the trainer subtracts another baseline on purpose, as OPO, ReMax and plain REINFORCE do")
NO_WEIGHTS = Phrase("the reward has several parts, and their weights are not recorded")


class Columns(NamedTuple):
    """The rollouts of whole groups whose rewards differ, each column [n]."""

    step: Array
    group: Array
    signal: Array
    """What advantages are computed from."""
    advantage: Array
    mixed: Array
    """The signal minus the means of interleaved groups."""
    beside: Array
    """The signal minus the mean of as many neighbours as a group has."""
    scaled: Array
    """The same divided by the standard deviation of these neighbours."""


def are_chosen(data: RunData) -> bool:
    """Return whether advantages are only 0 or one positive number, so that responses are chosen, as by RAFT."""
    values = np.unique(data.rows["advantage"][np.isfinite(data.rows["advantage"])])
    return len(values) == 2 and values[0] == 0 < values[1]


@rule(
    number=72,
    needs=["rows.advantage", "rows.reward", "rows.group"],
    severity="error",
    min_steps=5,
    title="Advantages are not relative to their group",
    cause="An advantage is a reward minus the mean of its group or step, in units that its group or step share. {seen} "
    "of the mean square of the advantages of a step is something else{how}{unless}.",
    healthy="share of the mean square of a step's advantages that rewards minus means do not explain: 0, at most "
    "{limit}",
    fix="check that the responses to a prompt stand next to each other, and what is subtracted and divided by: the "
    "mean and standard deviation of the group (GRPO), or the mean of the other responses (RLOO)",
    source="GRPO 2402.03300, section 4.1; RLOO 2402.14740, section 3.2; Dr. GRPO 2503.20783; MaxRL 2602.02710; "
    "TRL's loss types",
    explains=["update-kl-large", "clip-fraction-high", "kl-explosion", *RUNAWAY],
    disproof=Disproof(
        ("rows.advantage",),
        "advantages are 0 or the same positive number: responses are chosen, not compared",
        are_chosen,
    ),
)
def group_advantages(data: RunData, *, limit: float = Share(0.001)) -> Reading | None:
    rows = data.sample.rows
    # TRL's table of completions does not have the weights; imported, the reward is the plain sum of its parts.
    if data.setting("format") == "trl" and len(rows.reward_parts) > 1:
        return Reading(float("nan"), False, undecided=NO_WEIGHTS)
    if not data.traits.get("relative", True):
        return Reading(float("nan"), False, undecided=OTHER_BASELINE)
    signal, advantage = _signal(data), rows["advantage"]
    whole = _whole(rows.group, signal, advantage)
    used = whole & _differs(rows.group, np.where(whole, signal, np.nan))
    if not repeated(rows) or not used.any():
        return None
    steps = np.unique(rows.step[used])
    anywhere = _in_any_order(rows.step, rows.group, signal, advantage, whole)[np.isin(rows.steps, steps)]
    mixed = signal - _tiled_means(data, signal)
    every = (rows.step, rows.group, signal, advantage, mixed, *_beside_neighbours(data, signal))
    columns = Columns(*(one[used] for one in every))
    share, signs = _wrong(columns, anywhere <= EXACT, _share_of_mean(data, steps), limit)
    points = series(steps, share)
    if len(points) < 5:
        return None
    bad = points.value > limit
    first = since(points, bad, 3)
    how = Phrase("")
    if first is not None:
        how = next((what for what, shown in zip(HOW, signs, strict=True) if np.mean(shown[steps >= first]) > 0.5), how)
    words = {"how": how, "unless": Phrase("") if data.traits.get("relative") else UNLESS}
    seen = Share(np.median(points.after(first).value))
    evidence = data.step_evidence(points.step[bad])
    return Reading(seen, first is not None, first, evidence, words, Curve(points, high=limit))


def _wrong(columns: Columns, anywhere: Array, mean: Array, limit: float) -> tuple[Array, tuple[Array, ...]]:
    """Return [S] how much of the mean square of the advantages rewards do not explain, and whether each of HOW does.

    The share is NaN for steps that are not judged, since advantages contain something that is not recorded.

    Args:
        columns: Of the rollouts.
        anywhere: [S] whether rewards explain the advantages of a step if these may stand in any order.
        mean: [S] share of the mean square of the advantages of a step that their mean makes.
        limit: Share above which something else is in the advantages.
    """
    step, group, signal, advantage, mixed, beside, scaled = columns
    forms = _forms(step, group, signal)
    left = _left(step, forms, advantage)
    is_mixed = _left(step, [mixed, mixed / _spread(group, signal)], advantage) <= limit
    is_mixed |= _left(step, [beside, scaled], advantage) <= limit
    is_elsewhere = anywhere & (left > limit) & (_left(step, forms, -advantage) > limit)
    linear, ordered, tied = _shares_of_groups(step, group, signal, advantage)
    is_clipped = (ordered >= KNOWN) & (tied > SOME)
    is_turned = (left > limit) & (_left(step, [np.abs(form) for form in forms], np.abs(advantage)) <= EXACT)
    judged = is_mixed | is_elsewhere | is_clipped | is_turned | (linear >= KNOWN)
    # Once rewards have explained all advantages for some steps, whatever else they suddenly contain is new. What grows
    # little by little may be a penalty by a KL that is not recorded: at first, there is none.
    settled = np.cumsum(judged & (left <= limit)) >= SETTLED
    begins = np.flatnonzero(settled & (left > limit))
    if len(begins) and left[begins[0]] > SUDDEN:
        judged |= settled
    # Whatever else they contain, those of a group or of a step have the mean 0.
    is_kept = mean > KEPT
    share = np.where(judged, left * (1 - mean), 0.0) + np.where(is_kept, mean, 0.0)
    falls = np.bincount(np.unique(step, return_inverse=True)[1], _product(group, signal, advantage)) < 0
    signs = (falls & ~is_elsewhere, is_mixed, is_elsewhere, is_clipped, is_turned, is_kept)
    return np.where(judged | is_kept, share, np.nan), signs


def _signal(data: RunData) -> Array:
    """Return [n] what advantages are computed from: the shaped reward, minus the KL penalty if that is part of it."""
    sample = data.sample
    rows = sample.rows
    reward = rows.trained_reward
    if data.setting("kl.place") != "reward" or not rows.has("kl_coef"):
        return reward
    spent = sample.total(estimate(data.setting("kl.estimator"), sample["kl_k1"], np.nan))
    return np.asarray(reward - np.where(rows["kl_coef"] == 0, 0.0, rows["kl_coef"] * spent))


def _whole(group: Array, signal: Array, advantage: Array) -> Array:
    """Return [n] whether a rollout is of a group of the usual size, at least 3, all of which is known."""
    size, known = np.bincount(group), np.bincount(group, np.isfinite(signal + advantage))
    whole = (size == known) & (size >= 3)
    usual = np.argmax(np.bincount(size[whole])) if whole.any() else 0
    return np.asarray((whole & (size == usual))[group])


def _differs(group: Array, signal: Array) -> Array:
    """Return [n] whether the rewards of the group of a rollout differ; those that are not finite do not count."""
    spread = np.where(np.isfinite(signal), _spread(group, signal), 0.0)
    return np.asarray(spread > 0.01 * np.median(spread[spread > 0])) if np.any(spread > 0) else spread > 0


def _spread(group: Array, signal: Array) -> Array:
    """Return [n] the standard deviation of the group of each rollout."""
    return np.sqrt(mean_of(group, (signal - mean_of(group, signal)) ** 2))


def _product(group: Array, one: Array, other: Array) -> Array:
    """Return [n] the products of two columns, each minus its group mean."""
    return np.asarray((one - mean_of(group, one)) * (other - mean_of(group, other)))


def _covariance(group: Array, one: Array, other: Array) -> Array:
    """Return [g] the sums of products of two columns, each minus its group mean."""
    return np.bincount(group, _product(group, one, other))


def _shares_of_groups(step: Array, group: Array, signal: Array, advantage: Array) -> tuple[Array, Array, Array]:
    """Return [S] the shares of the groups of each step in which the advantage is exactly a function of the reward.

    Of groups in which it is linear; in which it never falls; in which it is the same for some different rewards.
    """
    _, at, group = np.unique(group, return_index=True, return_inverse=True)
    of_signal, of_both, of_advantage = (
        _covariance(group, one, other) for one, other in ((signal, signal), (signal, advantage), (advantage, advantage))
    )
    is_linear = of_advantage - of_both**2 / of_signal <= EXACT * of_advantage
    order = np.lexsort((-advantage, signal, group))
    same, at_once = np.diff(group[order]) == 0, group[order][1:]
    rises = np.diff(advantage[order]) / np.maximum(_spread(group, advantage)[order][1:], 1e-12)
    differs = np.diff(signal[order]) > TIE * _spread(group, signal)[order][1:]
    falls, level = (
        np.bincount(at_once[same & some], minlength=len(at)) for some in (rises < -TIE, differs & (rises <= TIE))
    )
    of_step = np.unique(step[at], return_inverse=True)[1]
    count = np.bincount(of_step)
    linear, ordered, tied = (np.bincount(of_step, which) / count for which in (is_linear, falls == 0, level > 0))
    return linear, ordered, tied


def _share_of_mean(data: RunData, steps: Array) -> Array:
    """Return [S] the share of the mean square of the advantages of some steps that their mean makes.

    It is 0 for steps in which some responses have no advantage: those of the others need not have the mean 0.
    """
    rows = data.rows
    at = np.isin(rows.step, steps)
    of_step, advantage = np.searchsorted(steps, rows.step[at]), rows["advantage"][at]
    total, squares, count = (np.bincount(of_step, one) for one in (advantage, advantage**2, np.ones(len(advantage))))
    return np.asarray(np.nan_to_num(total**2 / np.maximum(count * squares, 1e-12)))


def _in_any_order(step: Array, group: Array, signal: Array, advantage: Array, whole: Array) -> Array:
    """Return what ``_left`` does, [S] of all steps, if the advantages of a step may stand in any order.

    NaN for steps some of whose groups are not whole.
    """
    steps, of_step = np.unique(step, return_inverse=True)
    complete = np.bincount(of_step, ~whole) == 0
    found = np.full(len(steps), np.nan)
    if not complete.any():
        return found
    inside = complete[of_step]
    step, group, signal, advantage = (one[inside] for one in (step, group, signal, advantage))
    ordered = advantage[np.lexsort((advantage, step))]
    forms = [form[np.lexsort((form, step))] for form in _forms(step, group, signal)]
    found[complete] = _left(np.sort(step), forms, ordered)
    return found


def _forms(step: Array, group: Array, signal: Array) -> list[Array]:
    """Return the usual forms of an advantage, each [n], up to a scale and an offset of the step."""
    spread = _spread(group, signal)
    spread = np.where(spread > 1e-6 * spread.max(initial=0.0), spread, 1.0)
    of_step = np.unique(step, return_inverse=True)[1]
    mean = mean_of(group, signal)
    in_group, in_step = signal - mean, signal - mean_of(of_step, signal)
    over_mean = [in_group / np.where(mean > 0, mean, 1.0)] if np.all(signal >= 0) else []  # MaxRL
    return [in_group, in_group / spread, in_step, in_step / spread, *over_mean]


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


def _beside_neighbours(data: RunData, signal: Array) -> tuple[Array, Array]:
    """Return [n] the signal minus the mean of a block of neighbours, and the same in their standard deviations.

    Blocks have the size of a group. They are the groups themselves unless these are strided, as after ``repeat`` where
    ``repeat_interleave`` was meant. NaN if the step is incomplete, or does not consist of such blocks.
    """
    rows = data.sample.rows
    size = int(np.median(np.bincount(rows.group)[rows.group])) if len(rows) else 1
    block = np.full(len(rows), -1)
    for step in rows.steps:
        at = np.flatnonzero(rows.step == step)
        if len(at) % size == 0 and len(at) == np.sum(data.rows.step == step):
            block[at] = at[0] + np.arange(len(at)) // size
    known = block >= 0
    key = np.unique(block, return_inverse=True)[1]
    centred = np.where(known, signal - mean_of(key, signal), np.nan)
    return centred, centred / np.maximum(_spread(key, signal), 1e-9)


def _left(step: Array, forms: Sequence[Array], advantage: Array) -> Array:
    """Return [S] the share of the variance of each step's advantages that the best of some forms leaves."""
    return np.asarray(np.min([_unexplained(step, form, advantage) for form in forms], axis=0))


def _unexplained(step: Array, form: Array, advantage: Array) -> Array:
    """Return [S] the share of the variance of each step's advantages that a positive multiple of a form leaves."""
    of_step = np.unique(step, return_inverse=True)[1]
    of_form, of_both, of_advantage = (
        _covariance(of_step, one, other) for one, other in ((form, form), (form, advantage), (advantage, advantage))
    )
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN in steps in which one of the two does not vary
        explained = np.maximum(of_both, 0.0) ** 2 / of_form
        return np.asarray(1 - explained / of_advantage)
