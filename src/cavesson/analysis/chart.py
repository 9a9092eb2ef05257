"""Metrics of a run over its steps as a matplotlib figure."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from cavesson.errors import UserError
from cavesson.findings.finding import Finding, Severity
from cavesson.notebook import MAX_CURVES, SHOWN
from cavesson.record import Run

_CURVE = "#1a73e8"
_COLOURS: Mapping[Severity, str] = {"error": "#bb3a2c", "warning": "#e0a020", "note": "#17605a"}

Array = NDArray[np.float64]


class Chart(Figure):
    """A figure that a notebook displays without pyplot, which would display it a second time."""

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        self.savefig(file, format="png", dpi=100)
        return file.getvalue()


class MetricCurve(NamedTuple):
    """A metric where it is finite."""

    steps: Array
    """[n]"""
    values: Array
    """[n]"""


class SmoothedCurve(NamedTuple):
    """A curve of means, each [points]."""

    steps: Array
    means: Array
    deviations: Array
    """Standard deviation of the values behind each mean."""


def smoothed(curve: MetricCurve, points: int) -> SmoothedCurve:
    """Return the means of at most ``points`` groups of consecutive values of about the same size.

    Args:
        curve: At least one value.
        points: At least 1.
    """
    steps, values = curve
    edges = np.linspace(0, len(values), min(points, len(values)) + 1).astype(int)
    starts, sizes = edges[:-1], np.diff(edges)

    def means(of: Array) -> Array:
        return np.asarray(np.add.reduceat(of, starts) / sizes)

    average = means(values)
    return SmoothedCurve(means(steps), average, np.sqrt(means((values - np.repeat(average, sizes)) ** 2)))


def curves_of(run: Run, metrics: Sequence[str]) -> dict[str, MetricCurve]:
    """Return the curves of metrics of a run, of the main ones if none are named.

    Raises:
        UserError: The run has no such metric.
    """
    table = run.steps()
    names = metrics or [name for name in SHOWN if name in table.column_names][:MAX_CURVES]
    if not names:
        raise UserError(f"{run.folder} has none of the main metrics; name some of run.steps().column_names")
    return {name: _curve(run, table, name) for name in names}


def drawn(curves: Mapping[str, MetricCurve], points: int, findings: Iterable[Finding]) -> Chart:
    """Draw curves one below the other, each of at most ``points`` points, with the beginnings of findings."""
    figure = Chart(figsize=(9, 0.8 + 2 * len(curves)), layout="constrained")
    panels = figure.subplots(len(curves), sharex=True, squeeze=False)[:, 0]
    beginning = [one for one in findings if one.root and one.since_step is not None]
    for axes, (name, curve) in zip(panels, curves.items(), strict=True):
        _draw_curve(axes, curve, points)
        axes.set_ylabel(name)
        axes.spines[["top", "right"]].set_visible(False)
        for one in beginning:
            axes.axvline(one.since_step, color=_COLOURS[one.severity], linestyle="--", label=one.title)
    panels[-1].set_xlabel("step")
    if beginning:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", frameon=False)
    return figure


def _curve(run: Run, table: pa.Table, name: str) -> MetricCurve:
    if name not in table.column_names:
        near = difflib.get_close_matches(name, table.column_names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "run.steps().column_names lists them"
        raise UserError(f"{run.folder} has no metric {name!r}; {hint}")
    values = np.asarray(table[name].to_numpy(), np.float64)
    there = np.isfinite(values)
    return MetricCurve(table["step"].to_numpy().astype(np.float64)[there], values[there])


def _draw_curve(axes: Axes, curve: MetricCurve, points: int) -> None:
    if not len(curve.steps):
        return
    line = smoothed(curve, points)
    axes.plot(line.steps, line.means, color=_CURVE)
    if len(curve.steps) > points:
        low, high = line.means - line.deviations, line.means + line.deviations
        axes.fill_between(line.steps, low, high, color=_CURVE, alpha=0.2, linewidth=0)
