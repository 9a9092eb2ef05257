"""A quantity by step, and robust statistics of it."""

from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cavesson.doctor.mann_kendall import mann_kendall
from cavesson.sorted_arrays import are_first

Array = np.ndarray[Any, np.dtype[Any]]

MAX_POINTS = 400
"""Theil–Sen compares all pairs of points, so longer series are averaged down to this many."""


class Series(NamedTuple):
    """Values by step, finite, in ascending order of the steps."""

    step: Array
    """[S] int64"""
    value: Array
    """[S] float64"""

    def __len__(self) -> int:
        return len(self.step)

    def where(self, kept: Array) -> "Series":
        """Return the points for which ``kept`` [S] is true."""
        return Series(self.step[kept], self.value[kept])

    def after(self, step: int | None) -> "Series":
        """Return the points from a step on; all of them for None."""
        return self if step is None else self.where(self.step >= step)

    def first(self) -> float:
        """Return the median of the first tenth of the points, at least of three."""
        return float(np.median(self.value[: max(3, round(0.1 * len(self)))]))

    def last(self, share: float = 0.1) -> float:
        """Return the median of the last ``share`` of the points, at least of three."""
        return float(np.median(self.value[-max(3, round(share * len(self))) :]))


def read_only(values: Array) -> Array:
    """Return a read-only view, so that a rule that writes into shared values fails where it does so."""
    values = values.view()
    values.flags.writeable = False
    return values


def series(step: Array, value: Array) -> Series:
    """Return the finite values in the order of their steps."""
    finite = np.isfinite(value)
    order = np.argsort(step[finite], kind="stable")
    return Series(step[finite][order].astype(np.int64), value[finite][order].astype(np.float64))


def mean_by_step(step: Array, values: Array) -> Series:
    """Return the mean of the finite values [n] of each step."""
    order = np.argsort(step, kind="stable")  # takes no time if the steps ascend, as those of rollouts do
    step = step[order]
    begin = np.flatnonzero(are_first(step))
    return Series(step[begin], np.add.reduceat(values[order], begin) / np.diff(begin, append=len(step)))


def together(*several: Series) -> list[Series]:
    """Return the series restricted to their common steps."""
    common = several[0].step
    for one in several[1:]:
        common = np.intersect1d(common, one.step)
    return [one.where(np.isin(one.step, common)) for one in several]


class Trend(NamedTuple):
    """The overall rise or fall of a series."""

    change: float
    """Theil–Sen slope times the range of the steps: by how much it rose, outliers aside."""
    p: float
    """Mann–Kendall: the probability of an order as strong as this one by chance, both directions."""


def trend(points: Series) -> Trend:
    """Return the trend of a series.

    Neighbouring steps of a run are correlated, which would make p too small. It is therefore computed from the means of
    at most 20 segments.

    Sources: Theil (1950), Sen (1968); Mann (1945), Kendall (1975).
    """
    if len(points) < 4:
        return Trend(0.0, 1.0)
    thin = averaged(points, MAX_POINTS)
    early, late = np.triu_indices(len(thin), 1)
    slope = np.median((thin.value[late] - thin.value[early]) / (thin.step[late] - thin.step[early]))
    return Trend(float(slope) * float(points.step[-1] - points.step[0]), mann_kendall(averaged(points, 20).value))


def averaged(points: Series, most: int) -> Series:
    """Return at most ``most`` points: the means of segments of about equal length."""
    if len(points) <= most:
        return points
    edges = np.linspace(0, len(points), most + 1).astype(int)[:-1]
    count = np.diff(np.append(edges, len(points)))
    return Series(points.step[edges], np.add.reduceat(points.value, edges) / count)


def smoothed(points: Series, width: int = 5) -> Series:
    """Return the running median over ``width`` points, fewer at the ends."""
    half, value = width // 2, points.value.tolist()
    return Series(points.step, np.array([median(value[max(0, i - half) : i + half + 1]) for i in range(len(value))]))


def since(points: Series, bad: Array, least: int, share: float = 0.8) -> int | None:
    """Return the step from which the series is bad and stays so; None if it is not bad, or not for long enough.

    Args:
        points: The series.
        bad: [S] whether each point is bad.
        least: Minimum number of bad points.
        share: Minimum share of bad points from the returned step to the end of the bad period.
    """
    best: int | None = None
    start, count, total = None, 0, 0
    for i, is_bad in enumerate(bad.tolist()):
        if start is None:
            if not is_bad:
                continue
            start, count, total = i, 0, 0
        count, total = count + is_bad, total + 1
        if count / total < share:
            start = None
        elif count >= least and best is None:
            best = start
    return None if best is None else int(points.step[best])


def earliest(steps: Array) -> int | None:
    """Return the smallest step; None if there are none."""
    return int(steps.min()) if len(steps) else None


def slope_by_step(step: Array, x: Array, y: Array) -> Series:
    """Return the least-squares slope of y [n] on x [n] in each step in which x varies."""
    steps, where = np.unique(step, return_inverse=True)
    count = np.bincount(where)
    x, y = (values - (np.bincount(where, values) / count)[where] for values in (x, y))
    variance = np.bincount(where, x * x)
    varies = variance > 1e-6 * variance.max()
    return Series(steps[varies], np.bincount(where, x * y)[varies] / variance[varies])


def standard_error(values: Array) -> float:
    """Return the standard error of the mean of finite values; infinite for fewer than two values."""
    return float(standard_errors(values, 0))


def standard_errors(values: Array, axis: int) -> Any:
    """Return the standard errors of the means along an axis, as ``standard_error``."""
    size = values.shape[axis]
    return np.std(values, axis, ddof=1) / np.sqrt(size) if size > 1 else np.inf


def over_median(points: Series, width: int = 11) -> Array:
    """Return [S] each value divided by the median of those before it; NaN for the first three and for a median of 0."""
    value = points.value.tolist()
    before = [median(value[max(0, i - width) : i]) if i >= 3 else np.nan for i in range(len(value))]
    return np.asarray(points.value / np.where(np.array(before) == 0, np.nan, before))
