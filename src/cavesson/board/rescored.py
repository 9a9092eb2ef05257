"""Recorded rewards beside those that `cavesson rescore` computed: what changes, and for which groups."""

from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from cavesson.board.asked import shown
from cavesson.board.buckets import Buckets, buckets
from cavesson.board.excerpts import LENGTH
from cavesson.board.names import MAX_NAME
from cavesson.board.rows import answers
from cavesson.board.runs import Board, NotFoundError, OpenRun, reading
from cavesson.board.selection import SplitQuery
from cavesson.correlation import rank_correlation
from cavesson.index.columns import Array
from cavesson.index.prompt_ids import ids_of
from cavesson.index.snapshot import Snapshot
from cavesson.ops.intervals import Interval, mean_interval_of_sums, share_interval_of_counts
from cavesson.ops.order_changes import OrderChanges, order_changes
from cavesson.record.keys import rollout_keys
from cavesson.record.read.both_rewards import both_rewards

POINTS = 60
"""Of the curves."""


class RescoredQuery(SplitQuery):
    name: str = Field(max_length=MAX_NAME)
    """Name under which the rewards were computed again."""
    limit: int = Field(10, ge=0, le=100)
    """Maximum number of groups."""


class Compared(NamedTuple):
    """[N] rollouts of a split with both rewards, of which either is NaN where it judges nothing."""

    rows: Array
    """[N] their rows in the index."""
    step: Array
    prompt: Array
    """[N] their prompts, numbered from 0; responses to the same prompt resemble each other."""
    group: Array
    """[N] a number for each prompt of a step."""
    recorded: Array
    again: Array


def rescored(board: Board, query: RescoredQuery) -> dict[str, Any]:
    """Compare the recorded rewards of a split with those of a name, as ``cavesson rescore`` does.

    ``recorded`` and ``again`` are the mean rewards, and ``difference`` is how much more the run would have been paid,
    over the responses that both judge, each with the bounds of its 95 % interval; ``share`` is the share of the pairs
    of responses to a prompt in a step that the two rewards order differently, of those that both tell apart. In all
    intervals, the prompts count as independent. ``groups`` are those with the pairs that are furthest apart by both.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    if query.name not in snapshot.state.rescored:
        known = ", ".join(sorted(snapshot.state.rescored)) or "none"
        raise NotFoundError(f"{run.name} has no rewards {query.name!r} that were computed again; there are: {known}")
    key = (
        snapshot.rows,
        snapshot.state.dead,
        query.name,
        query.split,
        query.limit,
    )
    return run.cache.get("rescored", key, lambda: _compared(run, snapshot, query), most=4)


def _compared(run: OpenRun, snapshot: Snapshot, query: RescoredQuery) -> dict[str, Any]:
    with reading():
        of = _rewards(run, snapshot, query)
    both = np.flatnonzero(~np.isnan(of.recorded) & ~np.isnan(of.again))
    order = order_changes(of.recorded[both], of.again[both], of.group[both], query.limit)
    grouping = buckets(of.step, POINTS) if len(of.step) else Buckets(*np.empty((2, 0)))
    where, points = grouping.of(of.step), len(grouping.first)
    return {
        "rollouts": len(of.step),
        "both": len(both),
        "recorded": _mean(of.recorded, of.prompt),
        "again": _mean(of.again, of.prompt),
        "difference": _mean(of.again - of.recorded, of.prompt),
        "correlation": rank_correlation(of.recorded[both], of.again[both]) if len(both) else None,
        "pairs": order.pairs,
        "ordered": order.ordered,
        "flipped": order.flipped,
        "share": _share(order, of, both),
        "all_groups": order.groups,
        "flipped_groups": order.flipped_groups,
        "steps": grouping.pairs(),
        "curves": {
            name: _curve(values, where, points) for name, values in (("recorded", of.recorded), ("again", of.again))
        }
        | {"flipped": _flipped_curve(order, of, both, where, points)},
        "groups": _groups(run, snapshot, of, [(both[one], both[other]) for one, other in order.worst]),
    }


def _rewards(run: OpenRun, snapshot: Snapshot, query: RescoredQuery) -> Compared:
    """Return both rewards of the rollouts of a split that are indexed, which says their prompts."""
    found = both_rewards(run.record, query.name)
    mask = snapshot.of(query.split)
    rows = np.arange(snapshot.rows) if mask is None else np.flatnonzero(mask)
    keys = (snapshot.raw("step")[rows].astype(np.int64) << 32) + snapshot.raw("sample")[rows]
    _, at, there = np.intersect1d(rollout_keys(found.rows), keys, assume_unique=True, return_indices=True)
    index = rows[there]
    prompt = np.unique(snapshot.raw("prompt")[index], return_inverse=True)[1]
    step = found.rows["step"].to_numpy()[at]
    recorded, again = (np.where(np.isfinite(one), one, np.nan)[at] for one in (found.recorded, found.again))
    return Compared(index, step, prompt, found.group[at], recorded, again)


def _mean(values: Array, prompt: Array) -> list[float | None] | None:
    """Return the mean of the values that are known, with the bounds of its interval; None without any."""
    known = ~np.isnan(values)
    if not known.any():
        return None
    counts = np.bincount(prompt[known])
    sums = np.bincount(prompt[known], values[known])
    return _bounds(mean_interval_of_sums(sums[counts > 0], counts[counts > 0]))


def _bounds(found: Interval) -> list[float | None]:
    return [found.mean, found.low, found.high]


def _share(order: OrderChanges, of: Compared, both: Array) -> list[float | None] | None:
    """Return the share of the pairs whose order changes, with the bounds of its interval."""
    prompt = of.prompt[both][_first(of.group[both])]  # of each group, in the order of their numbers
    flipped, ordered = (np.bincount(prompt, values).astype(int) for values in (order.flipped_in, order.ordered_in))
    there = ordered > 0
    if not there.any():
        return None
    return _bounds(share_interval_of_counts(flipped[there].tolist(), ordered[there].tolist()))


def _first(groups: Array) -> Array:
    return np.unique(groups, return_index=True)[1]


def _curve(values: Array, where: Array, points: int) -> Array:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(where[known], values[known], points) / np.bincount(where[known], minlength=points)


def _flipped_curve(order: OrderChanges, of: Compared, both: Array, where: Array, points: int) -> Array:
    """Return by point the share of the pairs whose order changes."""
    place = where[both][_first(of.group[both])]
    with np.errstate(invalid="ignore"):
        return np.bincount(place, order.flipped_in, points) / np.bincount(place, order.ordered_in, points)


def _groups(run: OpenRun, snapshot: Snapshot, of: Compared, pairs: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return for each pair its prompt and both responses, of which the recorded reward prefers the first.

    Of an episode, the response is what the policy said last.
    """
    rows = np.array(pairs, np.int64).reshape(-1)
    index = of.rows[rows]
    texts, last = run.texts(snapshot, index), answers(run, snapshot, index)
    numbers = (values[rows].tolist() for values in (of.recorded, of.again))
    sides = [
        {
            "sample": sample,
            "recorded": recorded,
            "again": again,
            "response": (said if said is not None else text)[:LENGTH],
        }
        for (_, sample), recorded, again, text, said in zip(
            snapshot.keys(index), *numbers, texts.response, last, strict=True
        )
    ]
    ids, steps, prompts = ids_of(snapshot, index), of.step[rows].tolist(), shown(run, snapshot, texts.prompt)
    return [
        {"step": steps[i], "prompt_id": ids[i], "prompt": prompts[i], "responses": sides[i : i + 2]}
        for i in range(0, len(rows), 2)
    ]
