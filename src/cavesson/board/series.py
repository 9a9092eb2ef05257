"""Series over the steps: the logged metrics, and the distribution of every column of the rollouts."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from cavesson.board.buckets import Buckets, buckets, summary
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import RunQuery, Steps
from cavesson.board.shares import SHARES, Shares, missing
from cavesson.doctor.names import ALIASES, UNCLEAR, logged_as
from cavesson.index.columns import Array
from cavesson.index.rollups import Level, Rollups, rollups
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import GIVEN, HELD_OUT, Split

MAX_ROLLUPS = 40
MAX_SUMMARIES = 100
OF_ALL_STEPS = ("reward", "length")
"""Columns that each step with rollouts has."""
NOT_PLOTTED = {"step", "sample", "attempt", "rank", "group", "policy_version"}


class SeriesQuery(RunQuery):
    names: str = Field("", max_length=20_000)
    """Metrics and columns, comma-separated; part/* for all whose names begin with part/; all of them if empty."""
    steps: Steps = None
    """First and last step."""
    points: int = Field(2_000, ge=2, le=20_000)
    """Maximum number of points; more steps are merged."""


def series(board: Board, query: SeriesQuery) -> dict[str, Any]:
    """Return metrics and roll-ups by step, or by groups of steps so that there are at most ``points``.

    A metric that another trainer logged under its own name is there under Cavesson's name, too: ``called`` maps the one
    to the other. ``shares`` are metrics that were not logged and follow from the rollouts.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    metrics = _within(snapshot.metrics, query.steps)
    logged = [name for name in metrics.column_names if name not in ("step", "attempt")]
    called = _called(logged)
    measured = _measured(snapshot)
    shares = missing(snapshot, (*logged, *called))
    wanted = _wanted(query.names, [*logged, *called, *measured, *shares])
    found = {name: _share(run, snapshot, name, query.steps) for name in shares if wanted is None or name in wanted}
    columns = {
        name: rollups_of(run, snapshot, name, query.steps)
        for name in measured
        if wanted is None or not wanted.isdisjoint((name, f"eval/{name}")) or (found and name in OF_ALL_STEPS)
    }
    steps = [metrics["step"].to_numpy(), *(lines.step for lines in columns.values())]
    grouping = buckets(np.concatenate(steps), query.points)
    return {
        "step": grouping.first,
        "steps": grouping.pairs(),
        "metrics": {
            name: _means(metrics["step"].to_numpy(), metrics[called.get(name, name)].to_numpy(), grouping)
            for name in (*logged, *called)
            if wanted is None or name in wanted
        }
        | {name: _means(*share, grouping) for name, share in found.items()},
        "rollups": {
            name: values
            for column, lines in columns.items()
            for name, values in _summaries(run, snapshot, column, lines, grouping).items()
            if wanted is None or name in wanted
        },
        "names": {"metrics": logged, "rollups": measured, "called": called, "shares": shares},
    }


def _wanted(names: str, known: Collection[str]) -> set[str] | None:
    """Return the names that are asked for, or None for all of them."""
    if not names:
        return None
    asked = names.split(",")
    starts = tuple(name.removesuffix("*") for name in asked if name.endswith("/*"))
    return {*asked, *(name for name in known if name.startswith(starts))}


def names_of(snapshot: Snapshot) -> set[str]:
    """Return the names of all curves of training: of metrics, also by Cavesson's names, of columns, and of shares."""
    logged = [name for name in snapshot.metrics.column_names if name not in ("step", "attempt")]
    called = _called(logged)
    return {*logged, *called, *_measured(snapshot), *missing(snapshot, (*logged, *called))}


def _measured(snapshot: Snapshot) -> list[str]:
    return [name for name in snapshot.numbers if name not in NOT_PLOTTED]


def _summaries(
    run: OpenRun, snapshot: Snapshot, column: str, lines: Rollups, grouping: Buckets
) -> dict[str, dict[str, Array]]:
    """Return the roll-up of each bucket for training and, under ``eval/``, for evaluation."""
    key = (column, snapshot.state.rollups.get("row"), grouping.first.tobytes(), grouping.last.tobytes())
    return run.cache.get("summaries", key, lambda: _summarised(snapshot, column, lines, grouping), most=MAX_SUMMARIES)


def _summarised(snapshot: Snapshot, column: str, lines: Rollups, grouping: Buckets) -> dict[str, dict[str, Array]]:
    size, where = len(grouping.first), grouping.of(lines.step)
    where = where + size * _held_out(snapshot, lines)
    values, there = summary(lines, where, 2 * size), np.bincount(where, minlength=2 * size)
    halves = {"": slice(size), "eval/": slice(size, None)}
    return {
        label + column: {name: numbers[half] for name, numbers in values.items()}
        for label, half in halves.items()
        if there[half].any()
    }


def rollups_of(
    run: OpenRun, snapshot: Snapshot, name: str, steps: tuple[int, int] | None = None, level: Level = "row"
) -> Rollups:
    """Return the roll-ups of one column of the rollouts or of their tokens, one line per step and split.

    Responses of the data are left out.
    """
    key = (level, name, snapshot.state.rollups.get(level))
    lines = run.cache.get("rollups", key, lambda: _sampled(snapshot, rollups(snapshot, level, name)), most=MAX_ROLLUPS)
    return lines if steps is None else lines.only((lines.step >= steps[0]) & (lines.step <= steps[1]))


def lines_of(snapshot: Snapshot, lines: Rollups, split: Split) -> Rollups:
    """Return the lines of a split."""
    return lines.only(_held_out(snapshot, lines) == (split == HELD_OUT))


def _sampled(snapshot: Snapshot, lines: Rollups) -> Rollups:
    """Return the lines of responses that the policy sampled."""
    given = _are_of(snapshot, lines, GIVEN)
    return lines.only(~given) if given.any() else lines


def _held_out(snapshot: Snapshot, lines: Rollups) -> Array:
    """Return [L] whether each line is of held-out rollouts."""
    return _are_of(snapshot, lines, HELD_OUT)


def _are_of(snapshot: Snapshot, lines: Rollups, split: Split) -> Array:
    known = snapshot.state.codes.get("split", [])
    if split not in known:
        return np.zeros(len(lines.lines), np.bool_)
    return np.asarray(lines.lines["split"] == known.index(split))


def _called(logged: Collection[str]) -> dict[str, str]:
    """Return what a trainer calls metrics that it did not log under Cavesson's names."""
    known = {name: [one for one in logged_as(name) if one in logged and one not in UNCLEAR] for name in ALIASES}
    return {name: found[0] for name, found in known.items() if found and name not in logged}


def _within(table: pa.Table, steps: tuple[int, int] | None) -> pa.Table:
    if steps is None:
        return table
    return table.filter((pc.field("step") >= steps[0]) & (pc.field("step") <= steps[1]))


def _share(run: OpenRun, snapshot: Snapshot, name: str, steps: tuple[int, int] | None) -> Shares:
    key = (name, snapshot.rows, snapshot.state.dead)
    share = run.cache.get("shares", key, lambda: SHARES[name].of(snapshot), most=len(SHARES))
    kept = slice(None) if steps is None else (share.step >= steps[0]) & (share.step <= steps[1])
    return Shares(share.step[kept], share.value[kept])


def _means(step: Array, values: Array, grouping: Buckets) -> Array:
    """Return the mean of the finite values of a metric in each bucket."""
    finite = np.isfinite(values)
    where, size = grouping.of(step[finite]), len(grouping.first)
    with np.errstate(all="ignore"):
        means: Array = np.bincount(where, values[finite], minlength=size) / np.bincount(where, minlength=size)
    return means
