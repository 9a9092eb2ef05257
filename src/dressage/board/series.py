"""Curves over the steps: the logged metrics, and the spread of every column of the rollouts."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from dressage.board.buckets import Buckets, buckets, summary
from dressage.board.runs import Board, OpenRun
from dressage.board.selection import RunQuery, Steps
from dressage.index.columns import Array

MOST_ROLLUPS = 40
NOT_PLOTTED = {"step", "sample", "attempt", "rank", "group", "policy_version"}


class SeriesQuery(RunQuery):
    names: str = Field("", max_length=20_000)
    """Metrics and columns, with commas between; all of them if empty."""
    steps: Steps = None
    """First and last step."""
    points: int = Field(2_000, ge=2, le=20_000)
    """Most points; more steps than that are put together."""


def series(board: Board, query: SeriesQuery) -> dict[str, Any]:
    """Returns metrics and roll-ups by step, or by as many steps together as ``points`` demands."""
    run = board.run(query.run)
    wanted = set(query.names.split(",")) if query.names else None
    metrics = _within(metrics_of(run), query.steps)
    columns = {name: _within(rollups_of(run, name), query.steps) for name in rollup_names(run)}
    steps = [metrics["step"].to_numpy(), *(lines["step"].to_numpy() for lines in columns.values())]
    everything = np.concatenate(steps)
    grouping = buckets(everything, query.points)
    rollups = {}
    for name, lines in columns.items():
        for split, label in _splits(lines):
            if wanted is None or label + name in wanted:
                rollups[label + name] = summary(split, grouping)
    return {
        "step": grouping.first,
        "steps": grouping.pairs(),
        "metrics": {
            name: _means(metrics, name, grouping)
            for name in metrics.column_names
            if name not in ("step", "attempt") and (wanted is None or name in wanted)
        },
        "rollups": rollups,
        "names": {
            "metrics": [n for n in metrics.column_names if n not in ("step", "attempt")],
            "rollups": list(columns),
        },
    }


def metrics_of(run: OpenRun) -> pa.Table:
    """Returns the metrics by step, read again when the record has grown."""
    table: pa.Table = run.memory.get("metrics", run.version(), run.record.steps, most=1)
    return table


def rollup_names(run: OpenRun) -> list[str]:
    """Returns the columns of rollouts that make a curve."""
    return [name for name in run.snapshot().numbers if name not in NOT_PLOTTED]


def rollups_of(run: OpenRun, name: str, level: str = "row") -> pa.Table:
    """Returns the roll-ups of one column of the rollouts, or of their tokens, one line per step and split."""
    lines: pa.Table = run.memory.get(
        "rollups", (name, run.version()), lambda: run.record.rollups([name]), most=MOST_ROLLUPS
    )
    return lines.filter(pc.field("level") == level)


def _splits(lines: pa.Table) -> list[tuple[pa.Table, str]]:
    """Returns the lines of training, and under ``eval/`` those of evaluation."""
    evaluation = pc.fill_null(pc.equal(lines["split"], "eval"), False)
    parts = [(lines.filter(pc.invert(evaluation)), ""), (lines.filter(evaluation), "eval/")]
    return [(part, label) for part, label in parts if part.num_rows]


def _within(table: pa.Table, steps: tuple[int, int] | None) -> pa.Table:
    if steps is None:
        return table
    return table.filter((pc.field("step") >= steps[0]) & (pc.field("step") <= steps[1]))


def _means(metrics: pa.Table, name: str, grouping: Buckets) -> Array:
    """Returns the mean of a metric over each bucket, of the finite values in it."""
    values = metrics[name].to_numpy()
    finite = np.isfinite(values)
    where, size = grouping.of(metrics["step"].to_numpy()[finite]), len(grouping.first)
    with np.errstate(all="ignore"):
        means: Array = np.bincount(where, values[finite], minlength=size) / np.bincount(where, minlength=size)
    return means
