"""Shares of the responses of a step that follow from the rollouts, for runs that did not log them."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from cavesson.board.groups import group_of
from cavesson.index.columns import MISSING, Array
from cavesson.index.snapshot import Snapshot
from cavesson.sorted_arrays import are_first, distinct


class Shares(NamedTuple):
    """A share of each step that has one."""

    step: Array
    """[S] ascending."""
    value: Array
    """[S] 0 to 1."""


def truncated(snapshot: Snapshot) -> Shares:
    """Return the share of responses that the length limit cut, of those whose end is known."""
    codes = snapshot.raw("finish_reason")
    rows = np.flatnonzero(_trained(snapshot) & (codes != MISSING["|u1"]))
    known = snapshot.state.codes["finish_reason"]
    is_cut = codes[rows] == known.index("length") if "length" in known else np.zeros(len(rows))
    return _shares(snapshot.raw("step")[rows], np.ones(len(rows)), is_cut)


def zero_variance(snapshot: Snapshot) -> Shares:
    """Return the share of responses whose group has equal rewards only, of those in groups of at least two."""
    reward = snapshot.column("reward")
    rows = np.flatnonzero(_trained(snapshot) & ~np.isnan(reward))
    step, group = snapshot.raw("step")[rows], group_of(snapshot, rows)
    order = np.lexsort((group, step))
    step, group, reward = step[order], group[order], reward[rows[order]]
    start = np.flatnonzero(are_first(step) | are_first(group))
    size = np.diff(np.append(start, len(rows)))
    is_equal = np.minimum.reduceat(reward, start) == np.maximum.reduceat(reward, start) if len(start) else size
    several = size > 1
    return _shares(step[start][several], size[several], is_equal[several])


class _Share(NamedTuple):
    logged: str
    """The metric that is the same, which trainers log."""
    needs: str
    """A column of the rollouts."""
    of: Callable[[Snapshot], Shares]


SHARES = {
    "rows/truncated": _Share("finish/length", "finish_reason", truncated),
    "rows/zero_variance": _Share("group/zero_std", "reward", zero_variance),
}
"""By their names in a series."""


def missing(snapshot: Snapshot, logged: Collection[str]) -> list[str]:
    """Return the shares that the rollouts tell, and that were not logged."""
    return [name for name, one in SHARES.items() if one.needs in snapshot.names and one.logged not in logged]


def _trained(snapshot: Snapshot) -> Array:
    mask = snapshot.of("train")
    return np.ones(snapshot.rows, np.bool_) if mask is None else mask


def _shares(step: Array, weight: Array, is_counted: Array) -> Shares:
    steps = distinct(step)
    where = np.searchsorted(steps, step)
    total = np.bincount(where, weight, minlength=len(steps))
    return Shares(steps, np.bincount(where, weight * is_counted, minlength=len(steps)) / total)
