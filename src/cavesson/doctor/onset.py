"""The step at which a problem began, with an interval, from the curve that a rule examines."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.series import MAX_POINTS, Array, Series, averaged, smoothed

CONFIDENCE = 0.9
"""Probability with which a problem began within the interval."""
MIN_POINTS = 6
JUMP = 0.5
"""Probability of a jump beforehand, relative to that of a line."""


def of_events(points: Series, events: Array) -> tuple[int, int] | None:
    """Return the interval in which events that occur by chance in a part of the steps became possible.

    Since the first of them they occur in a share r of the steps; k steps without one before it have the probability
    (1 − r)^k.

    Args:
        points: The steps that were examined.
        events: [e] those with an event, ascending.
    """
    if not len(events):
        return None
    rate = min(len(np.unique(events)) / len(points.after(int(events[0]))), 1 - 1e-9)
    steps = np.log(1 - CONFIDENCE) / np.log(1 - rate)
    at = int(np.searchsorted(points.step, events[0]))
    return int(points.step[max(0, at - int(steps))]), int(events[0])


class Onset(NamedTuple):
    """When a series changed."""

    step: int
    """The first step of the change; before and after it, equally probable steps."""
    low: int
    high: int
    before: float
    """The level before the change."""
    after: float
    """The level at the end of the series."""


def with_onset(reading: Reading, data: RunData) -> Reading:
    """Return a finding with the interval in which it began, and its first step in the middle of it.

    What the rule says remains if its curve does not show a beginning: one that is not along the steps, or too short.
    """
    curve = reading.curve if reading.course is None else Curve(reading.course)
    if reading.since is None or reading.between is not None or (curve and curve.along is not None):
        return reading
    if curve is None:  # an event
        return replace(reading, between=(reading.since, reading.since))
    if len(curve.points) < MIN_POINTS:
        return reading
    first = int(data.steps[0]) if len(data.steps) else 0
    begin = first if reading.window is None else reading.window[0]
    if reading.course is None and reading.since == first and curve.low is None is curve.high:
        return replace(reading, between=(first, first))
    rising = reading.course is not None or _rises(curve.points, reading.since)
    points = _relevant(reading, curve.points, rising)
    if len(points) < MIN_POINTS:
        return reading
    found = onset(points, rising, perhaps_always=reading.since == first)
    # Where the rule has examined the window alone, the problem may have begun before it.
    earliest = begin if points.step[0] >= begin else first
    if found.step == earliest or _was_unhealthy(curve, found, reading.course is not None):
        return replace(reading, since=earliest, between=(first, earliest))
    # A problem that the rule already sees at a step has begun by then, even if the curve changes most after it. The
    # first step of a window is not such a step: the problem may begin anywhere in the window.
    latest = reading.since if reading.since > begin else found.high
    return replace(reading, since=min(found.step, latest), between=(min(found.low, latest), min(found.high, latest)))


def _relevant(reading: Reading, points: Series, rising: bool) -> Series:
    """Return the points up to the worst one since the problem, from as many steps before the window as it has."""
    if reading.window is not None:
        points = points.after(2 * reading.window[0] - reading.window[1])
    later = smoothed(points).value[points.step >= reading.since]
    if not len(later) or reading.course is not None:
        return points
    worst = len(later) - 1 - int(np.argmax((later if rising else -later)[::-1]))
    return points.where(np.arange(len(points)) <= len(points) - len(later) + max(worst, MIN_POINTS // 2))


def _rises(points: Series, since: int) -> bool:
    """Return whether the values are higher from a step on than before it, or at the end than at the start."""
    early, late = points.value[points.step < since], points.value[points.step >= since]
    if not len(early) or not len(late):
        early, *_, late = np.array_split(points.value, 3)
    return bool(late.mean() > early.mean())


def _was_unhealthy(curve: Curve, onset: Onset, is_course: bool) -> bool:
    """Return whether a series was outside its healthy range before it changed, so that the problem only grew.

    Without a healthy range, or with one of a single value, that is so if the series did not change by half.
    """
    low, high = -np.inf if curve.low is None else curve.low, np.inf if curve.high is None else curve.high
    if low == high:
        return abs(onset.before - low) > abs(onset.after - low) / 2
    if is_course:
        return onset.before > onset.after / 2
    return not low <= onset.before <= high


def onset(points: Series, rising: bool, perhaps_always: bool = False) -> Onset:
    """Return when a series began to rise, or to fall.

    The series is assumed to have a constant level before, to change along a straight line from some point to a later
    one, and to stay there; a jump is such a line between two neighbouring points, and a line may go on until the end.
    Every first point is as probable as any other beforehand, a jump is half as probable as a line, and the length of a
    line is uniform with probability ½, and uniform in its logarithm otherwise. The noise is assumed to be normal, with
    one variance before the change and another one since, and with a correlation ρ of neighbouring points, which leaves
    n·(1 − ρ)/(1 + ρ) independent points. The result is the median and the central interval of the posterior
    distribution.

    Args:
        points: At least three points.
        rising: The direction.
        perhaps_always: Whether the series may not have changed at all: the change is then before its first point. By
            the Bayesian information criterion, this is as probable beforehand as the three numbers of a change.
    """
    points = averaged(points, MAX_POINTS)
    step, values = points.step.astype(np.float64), _clipped(points.value if rising else -points.value)
    begins = np.append(2 * step[0] - step[1], step[:-1])  # the last step before each possible beginning
    lengths = _lengths(len(step))
    found = _log_likelihood(step, values, begins, lengths)
    best = int(lengths[np.unravel_index(np.argmax(found), found.shape)[0]])
    near = np.arange(int(0.9 * best), int(1.1 * best) + 2)
    lengths = np.unique(np.append(lengths, near[(near >= 1) & (near <= len(step))]))
    found = _log_likelihood(step, values, begins, lengths)
    likely = np.exp(found - found.max())
    weight = (np.gradient(np.log(lengths)) / np.log(len(step)) + np.gradient(lengths.astype(float)) / len(step)) / 2
    weight[0] += JUMP
    if perhaps_always:
        likely[0, 0] *= len(step) ** 1.5
    likely = weight @ likely
    sure = np.cumsum(likely) / likely.sum()
    low, middle, high = (int(np.searchsorted(sure, one)) for one in ((1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2))
    before, after = (_level(some) for some in (points.value[: max(middle, 1)], points.value[-3:]))
    between = (int(begins[middle]) + 1 + int(step[middle])) // 2 if middle else int(step[0])
    return Onset(between, int(begins[low]) + 1 if low else int(step[0]), int(step[high]), before, after)


def _level(values: Array) -> float:
    """Return the mean without the largest and the smallest tenth; of shares of 0 and 1, the median is one of them."""
    some = np.sort(values)[len(values) // 10 : len(values) - len(values) // 10]
    return float(some.mean())


def _log_likelihood(step: Array, values: Array, begins: Array, lengths: Array) -> Array:
    """Return [L, S] the logarithm of the likelihood of a change of each length from each point on.

    Each variance has as a prior one observation, with the variance of the best fit in which both are equal.
    """
    count = len(values)
    before = np.arange(count)
    level = np.append(values.mean(), np.cumsum(values)[:-1] / before[1:])
    rest = np.cumsum(values**2)[-1] - 2 * level * values.sum() + count * level**2
    old = np.append(0.0, np.cumsum(values**2)[:-1] - before[1:] * level[1:] ** 2).clip(0)
    lines, ends = [], [np.minimum(before + length - 1, count - 1) for length in lengths]
    for last in ends:
        ramps = _ramps(step, begins, step[last])
        along = ramps @ values - level * ramps.sum(1)
        lines.append(np.maximum(along, 0.0) ** 2 / np.maximum(np.sum(ramps**2, 1), 1e-12))
    new = np.maximum(rest - old - np.array(lines), 0.0)
    line, at = np.unravel_index(np.argmin(old + new), new.shape)
    tiny = 1e-12 * (rest[0] / count) + 1e-300
    of_old = old[at] / max(at, 1) + tiny if at else (old + new)[line, at] / count + tiny
    of_new = new[line, at] / (count - at) + tiny
    ramp = _ramps(step, begins, step[ends[line]])[at]
    size = float(ramp @ (values - level[at])) / max(float(ramp @ ramp), 1e-12)
    share = (_independent(values - level[at] - max(size, 0.0) * ramp) - 2) / count
    logs = (before + 1) * np.log((old + of_old) / (before + 1))
    logs = logs + (count - before + 1) * np.log((new + of_new) / (count - before + 1))
    return np.asarray(-max(share, 1 / count) / 2 * logs)


def _ramps(step: Array, begins: Array, ends: Array) -> Array:
    """Return [S, S] for each beginning and its end how far the change is at each step, from 0 to 1."""
    found = np.clip((step - begins[:, None]) / (ends - begins)[:, None], 0.0, 1.0)
    found[0] -= found[0].mean()  # a change that begins at the first point has no level before it
    return np.asarray(found)


def _lengths(count: int) -> Array:
    """Return the numbers of points over which a change may go, about nine in each doubling."""
    return np.unique(np.round(2 ** (np.arange(8 * np.log2(count) + 1) / 8)).astype(int))


def _clipped(values: Array) -> Array:
    """Return the values without outliers: within half of the distance between the ends on each side of them.

    They are at most 1, so that squares of the largest numbers are finite.
    """
    values = values / max(float(np.abs(values).max()), 1e-300)
    low, high = np.sort([np.median(values[: max(3, len(values) // 10)]), np.median(values[-3:])])
    # More than half of the values may be equal, such as those of a share that is 0 or 1.
    spread = 1.4826 * float(np.median(np.abs(values - np.median(values)))) or float(np.std(values))
    margin = max(0.5 * (high - low), 3 * spread)
    return np.clip(values, low - margin, high + margin)


def _independent(residual: Array) -> float:
    """Return the number of independent points, from the correlation of neighbouring residuals of the best fit."""
    size, count = float(residual @ residual), len(residual)
    alike = float(residual[1:] @ residual[:-1]) / size if size > 0 else 0.0
    alike = float(np.clip(alike + (1 + 4 * alike) / count, 0.0, 0.95))
    return count * (1 - alike) / (1 + alike)
