"""A curve as SVG, with its healthy range and, for a curve over the steps, the step at which the problem began."""

import math
from html import escape

from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.series import averaged
from cavesson.doctor.words import Language
from cavesson.findings.words import Share

WIDTH, HEIGHT = 720, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 18, 24
MAX_POINTS = 600
TINY = 1e-300
NEARLY = 1e-4
"""A curve that varies by less than this share of its size is drawn as if it did not."""


def drawn(reading: Reading, language: Language) -> str:
    """Return an SVG of a reading's curve; empty if there is no curve or it has fewer than two points."""
    curve = reading.curve
    if curve is None:
        return ""
    say = language.phrase
    since = reading.since if curve.along is None else None
    label = "" if since is None else f"{say('since step')} {since}"
    share = curve.name is None and isinstance(reading.seen, Share)
    between = None if since is None else reading.between
    return chart(curve, since, escape(label), escape(say(curve.along or "step")), share=share, between=between)


def chart(
    curve: Curve,
    since: int | None,
    label: str,
    along: str,
    *,
    share: bool,
    between: tuple[int, int] | None = None,
) -> str:
    """Return an SVG of a curve; empty if it has fewer than two points.

    Args:
        curve: The curve to draw.
        since: The step at which the problem begins; None if it is not shown.
        label: The label at this step.
        along: The label of the x axis.
        share: Whether the values are shares, shown in per cent.
        between: The steps between which the problem began; None if that is not shown.
    """
    points = averaged(curve.points, MAX_POINTS)
    if len(points) < 2:
        return ""
    limits = [limit for limit in (curve.low, curve.high) if limit is not None]
    ticks = nice_ticks(min(*limits, *points.value), max(*limits, *points.value))
    first, last = int(points.step[0]), int(points.step[-1])

    def x(step: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first):.1f}"

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - ticks[0]) / (ticks[-1] - ticks[0])

    parts = [_band(y(ticks[-1] if curve.high is None else curve.high), y(ticks[0] if curve.low is None else curve.low))]
    if not limits:
        parts = []
    parts += [f'<path class="grid" d="M{LEFT} {y(t):.1f}H{WIDTH - RIGHT}"/>' for t in ticks]
    parts += [f'<text class="end" x="{LEFT - 6}" y="{y(t) + 4:.1f}">{_tick(t, share)}</text>' for t in ticks]
    for step, side in ((first, "start"), (last, "end")):
        parts.append(f'<text class="{side}" x="{x(step)}" y="{HEIGHT - 6}">{step}</text>')
    parts.append(f'<text class="middle" x="{x((first + last) / 2)}" y="{HEIGHT - 6}">{along}</text>')
    line = " ".join(f"{x(s)},{y(v):.1f}" for s, v in zip(points.step, points.value, strict=True))
    parts.append(f'<polyline class="curve" points="{line}"/>')
    if between is not None and first <= between[0] < between[1] <= last:
        place = f'x="{x(between[0])}" width="{float(x(between[1])) - float(x(between[0])):.1f}"'
        parts.append(f'<rect class="between" {place} y="{TOP}" height="{HEIGHT - TOP - BOTTOM}"/>')
    if since is not None and first <= since <= last:
        side = "start" if since < (first + last) / 2 else "end"
        parts.append(f'<path class="onset" d="M{x(since)} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text class="{side} onset" x="{x(since)}" y="{TOP - 5}">{label}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _tick(value: float, share: bool) -> str:
    return (f"{100 * value:g} %" if share else f"{value:g}").replace("-", "−")


def _band(top: float, bottom: float) -> str:
    height = max(bottom - top, 2.0)  # a minimum height, so that a healthy range of a single value is visible as a line
    return f'<rect class="healthy" x="{LEFT}" width="{WIDTH - LEFT - RIGHT}" y="{top:.1f}" height="{height:.1f}"/>'


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return at least two round, evenly spaced numbers that span the range from ``low`` to ``high``."""
    size = max(abs(low), abs(high))
    spread = high - low if high - low > NEARLY * size else size
    if spread < TINY:
        spread = 1.0
    unit = 10 ** math.floor(math.log10(spread / most))
    step = next(unit * factor for factor in (1, 2, 5, 10, 20) if spread / (unit * factor) <= most - 1)
    first = math.floor(low / step)
    count = max(math.ceil(high / step) - first, 1)
    return [(first + i) * step for i in range(count + 1)]
