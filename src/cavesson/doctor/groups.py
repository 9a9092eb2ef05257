"""Groups of rollouts of the same prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array

EQUAL = 1e-9
"""Standard deviation below which the rewards of a group are equal."""
ROUNDS = 8
"""Times that the means of each kind are subtracted."""


class Groups(NamedTuple):
    """Groups of two or more responses to the same prompt in the same step."""

    step: Array
    """[g]"""
    members: Array
    """[g]"""
    mean: Array
    """[g]"""
    sd: Array
    """[g]"""


def groups(rows: Rows, values: Array) -> Groups:
    """Return the mean and standard deviation of the finite values [n] of each group."""
    there = np.isfinite(values)
    group, value = rows.group[there], values[there]
    size = int(rows.group.max(initial=-1)) + 1
    count = np.bincount(group, minlength=size)
    mean = np.bincount(group, value, size) / np.maximum(count, 1)
    sd = np.sqrt(np.bincount(group, (value - mean[group]) ** 2, size) / np.maximum(count, 1))
    step = np.zeros(size, np.int64)
    step[group] = rows.step[there]
    several = count >= 2
    return Groups(step[several], count[several], mean[several], sd[several])


def equal_by_chance(rows: Rows, values: Array, found: Groups) -> Array:
    """Return [g] how probable it is that all values of a group are equal if those of a step go to anybody alike.

    The probability is Σ p(v)^m over the values v of the step, for a group of m.
    """
    chance = np.zeros(len(found.step))
    steps = np.unique(found.step)
    of_rows, of_groups = (np.searchsorted(step, [steps, steps + 1]).T for step in (rows.step, found.step))
    for (first, stop), (begin, end) in zip(of_rows, of_groups, strict=True):
        own = values[first:stop]
        _, count = np.unique(own[np.isfinite(own)].round(6), return_counts=True)
        chance[begin:end] = ((count / count.sum())[:, None] ** found.members[begin:end]).sum(0)
    return chance


def solved(rows: Rows, found: Groups) -> Array:
    """Return [g] whether all responses of a group get the same reward, which is one of the highest tenth of all."""
    known = rows["reward"][np.isfinite(rows["reward"])]
    is_high = (found.mean > np.quantile(known, 0.9) - EQUAL) & (found.mean > known.mean())
    return np.asarray((found.sd < EQUAL) & is_high)


def repeated(rows: Rows) -> bool:
    """Return whether prompts have several responses by design, and not because some were drawn twice by chance."""
    return bool(np.mean(np.bincount(rows.group) >= 2) > 0.8) if len(rows) else False


def within(rows: Rows, values: Array) -> Array:
    """Return [n] the values minus the mean of their group, or of their step if most prompts occur only once."""
    return np.asarray(values - mean_of(beside(rows, values), values))


def beside(rows: Rows, values: Array) -> Array:
    """Return [n] the number of the group of each value, or of its step if most prompts occur only once."""
    grouped = groups(rows, values).members.sum() > 0.5 * len(rows)
    return rows.group if grouped else np.searchsorted(rows.steps, rows.step)


def mean_of(key: Array, values: Array) -> Array:
    """Return [n] for each rollout the mean of the finite values with the same key, which counts from 0."""
    there = np.isfinite(values)
    size = int(key.max(initial=-1)) + 1
    count = np.bincount(key[there], minlength=size)
    return np.asarray((np.bincount(key[there], values[there], size) / np.maximum(count, 1))[key])


def without_means(values: Array, keys: Sequence[Array]) -> Array:
    """Return values [n] minus their means among equals of several kinds, by alternating projections.

    Source: von Neumann's alternating projections, as in Guimarães and Portugal (2010) for fixed effects.
    """
    for _ in range(ROUNDS if len(keys) > 1 else 1):
        for key in keys:
            values = np.asarray(values - mean_of(key, values))
    return values


def kind_effects(values: Array, kind: Array, step: Array) -> Array:
    """Return [n] by how much values differ because of their kind, at equal steps, from the mean; as in `without_means`.

    Where no step has two kinds, the kinds explain the difference between the steps.
    """
    where, effect = np.unique(step, return_inverse=True)[1], mean_of(kind, values)
    for _ in range(ROUNDS - 1):
        effect = mean_of(kind, values - mean_of(where, values - effect))
    there = np.isfinite(values)
    return np.asarray(effect - effect[there].mean()) if there.any() else effect
