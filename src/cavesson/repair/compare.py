"""The difference of the rewards of two forks, with an interval."""

from collections.abc import Mapping
from statistics import fmean, variance
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.ops.intervals import Interval, around, half_width

COLUMNS = ("step", "split", "prompt", "reward")
MIN_PROMPTS = 2
Rewards = Mapping[str, float]
"""Mean rewards by prompt."""


class Compared(NamedTuple):
    """Rewards with and without the change, on the same prompts."""

    difference: Interval
    """what training with the change gains more than training without it, and its 95 % interval"""
    changed: float
    """mean reward with the change"""
    unchanged: float
    at_once: float
    """the difference at the first step of the forks, whose weights are the same; a change of sampling makes one"""
    prompts: int
    held_out: bool
    """whether these are held-out prompts"""
    since: int
    """the first step that counts"""


def compare(changed: pa.Table, unchanged: pa.Table, start: int, end: int) -> Compared | None:
    """Compare the rewards of two forks in the second half of their steps, on held-out prompts if they were sampled.

    Their rollouts, with the change and without it, have the columns `COLUMNS`; the steps are those from `start` to
    before `end`.

    Returns:
        None if the forks have fewer than two prompts in common.
    """
    half = (start + end) // 2
    both = (changed, unchanged)
    first = _paired(*(_by_prompt(rows, "train", start, start) for rows in both))
    for split in ("eval", "train"):
        late = [_by_prompt(rows, split, half, end) for rows in both]
        found = _paired(*late)
        if found is not None and first is not None:
            difference = around(found.mean - first.mean, _half_width(found, first))
            common = late[0].keys() & late[1].keys()
            ours, theirs = (fmean(rewards[prompt] for prompt in sorted(common)) for rewards in late)
            return Compared(difference, ours, theirs, first.mean, len(common), split == "eval", half)
    return None


def _by_prompt(rows: pa.Table, split: str, first: int, last: int) -> Rewards:
    """Return the mean reward of each prompt of a split in some steps; rollouts without a split are trained on."""
    inside = pc.and_(pc.greater_equal(rows["step"], first), pc.less_equal(rows["step"], last))
    known = pc.and_(inside, pc.fill_null(pc.is_finite(rows["reward"]), False))
    there = rows.filter(pc.and_(known, pc.equal(pc.fill_null(rows["split"], "train"), split)))
    # Threads and chunks would add the rewards in another order each time, and round differently.
    means = there.combine_chunks().group_by("prompt", use_threads=False).aggregate([("reward", "mean")])
    return dict(zip(means["prompt"].to_pylist(), means["reward_mean"].to_pylist(), strict=True))


class _Paired(NamedTuple):
    mean: float
    variance: float
    """of the mean"""
    free: int
    """degrees of freedom"""


def _paired(ours: Rewards, theirs: Rewards) -> _Paired | None:
    """Return the mean difference of the prompts that both have answered."""
    differences = [ours[prompt] - theirs[prompt] for prompt in sorted(ours.keys() & theirs.keys())]
    count = len(differences)
    return None if count < MIN_PROMPTS else _Paired(fmean(differences), variance(differences) / count, count - 1)


def _half_width(one: _Paired, other: _Paired) -> float | None:
    """Return half the width of the interval of a difference; None if all prompts differ by the same."""
    both = one.variance + other.variance
    if both == 0:
        return None
    return half_width(both**0.5, both**2 / (one.variance**2 / one.free + other.variance**2 / other.free))
