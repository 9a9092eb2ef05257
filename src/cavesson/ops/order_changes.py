"""Which pairs of responses to the same prompt change their order under other rewards."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_COMPARISONS = 1 << 22
"""Pairs that are compared at once: 100 MB."""


class OrderChanges(NamedTuple):
    """How pairs within groups are ordered by two rewards. There are G groups, in the order of their numbers."""

    groups: int
    """groups with a pair"""
    pairs: int
    """all pairs within them"""
    ordered: int
    """pairs that both rewards tell apart"""
    flipped: int
    """of these, pairs that they order differently"""
    flipped_groups: int
    """groups with such a pair"""
    worst: list[tuple[int, int]]
    """rows of the pairs that are furthest apart by both, one per group, the worst first; the recorded reward prefers
    the first one"""
    ordered_in: Array
    """`[G]` pairs of each group that both rewards tell apart, also of groups without a pair"""
    flipped_in: Array
    """`[G]` of these, pairs that they order differently"""


def order_changes(recorded: Array, again: Array, group: Array, show: int) -> OrderChanges:
    """Compare the order of all pairs within groups by two rewards.

    Args:
        recorded: `[N]` rewards.
        again: `[N]` the other rewards of the same responses.
        group: `[N]` the group of each.
        show: how many of the worst pairs to return. How bad a pair is, is the product of its two differences.
    """
    rows = np.argsort(group, kind="stable")
    begins = np.flatnonzero(np.diff(group[rows], prepend=group[rows][0] - 1)) if len(rows) else rows
    sizes = np.diff(begins, append=len(rows))
    ordered, flipped = np.zeros(len(begins), np.int64), np.zeros(len(begins), np.int64)
    worst, pair = np.zeros(len(begins)), np.zeros((len(begins), 2), np.int64)
    for some, one, others in _compared(begins, sizes):
        product = (recorded[rows[one]] - recorded[rows[others]]) * (again[rows[one]] - again[rows[others]])
        np.add.at(ordered, some, (product != 0).sum(1))
        np.add.at(flipped, some, (product < 0).sum(1))
        other, least = product.argmin(1), product.min(1)
        for which in np.flatnonzero(least < worst[some]):  # few: each is worse than what was seen before
            if least[which] < worst[some[which]]:
                worst[some[which]] = least[which]
                pair[some[which]] = rows[one[which, 0]], rows[others[which, other[which]]]
    shown = [place for place in np.argsort(worst, kind="stable")[:show] if worst[place] < 0]
    pairs = [sorted(pair[place].tolist(), key=lambda row: -recorded[row]) for place in shown]
    return OrderChanges(
        groups=int((sizes > 1).sum()),
        pairs=int((sizes * (sizes - 1) // 2).sum()),
        ordered=int(ordered.sum()) // 2,
        flipped=int(flipped.sum()) // 2,
        flipped_groups=int((flipped > 0).sum()),
        worst=[(first, second) for first, second in pairs],
        ordered_in=ordered // 2,
        flipped_in=flipped // 2,
    )


def _compared(begins: Array, sizes: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield groups `[K]`, one of the places of each `[K, 1]`, and all of its places `[K, S]`, for each size S."""
    for size in np.unique(sizes[sizes > 1]):
        groups = np.repeat(np.flatnonzero(sizes == size), size)
        place = np.tile(np.arange(size), len(groups) // size)
        at_once = max(1, _COMPARISONS // size)
        for start in range(0, len(groups), at_once):
            some = groups[start : start + at_once]
            first = begins[some, None]
            yield some, first + place[start : start + at_once, None], first + np.arange(size)
