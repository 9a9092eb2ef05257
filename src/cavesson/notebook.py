"""Display of runs in a notebook: tables and curves as self-contained HTML, or as plain text."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any

from rich.console import Console

from cavesson.text.visible import visible_line

SHOWN = (
    "reward/mean", "kl/objective", "teacher/kl", "policy/entropy", "length/response_mean", "loss/total", "loss/nll",
    "loss/preference", "perplexity", "eval/perplexity", "reward/accuracy", "eval/reward/accuracy",
    "dpo/accuracy", "eval/dpo/accuracy", "dpo/reward_margin", "kto/accuracy", "eval/kto/accuracy",
    "kto/reward_margin", "optim/learning_rate",
)  # fmt: skip
"""Metrics that have a curve."""
MAX_CURVES = 6
"""Curves."""
WIDTH, HEIGHT, EDGE = 220, 56, 3
MAX_POINTS = 400
TEXT_WIDTH = 100
"""Characters of a line of text."""

Curve = tuple[Sequence[float], Sequence[float | None]]
"""Steps and values; None where nothing was measured."""


def page(title: str, facts: Mapping[str, Any], curves: Mapping[str, Curve]) -> str:
    """Return a title, facts in a table, and the first of the known metrics as curves; None is omitted."""
    shown = [name for name in SHOWN if name in curves][:MAX_CURVES]
    drawn = "".join(_curve(name, *curves[name]) for name in shown)
    return f"<div><strong>{_text(title)}</strong>{_table(facts)}<div>{drawn}</div></div>"


def grid(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return rows below the names of their columns as a table; None is an empty cell."""
    head = "".join(f"<th>{_text(name)}</th>" for name in columns)
    lines = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def printed(show: Callable[[Console], None]) -> str:
    """Return what a function prints to a console, as plain text."""
    file = StringIO()
    # Otherwise, rich displays it in the notebook itself.
    show(Console(file=file, width=TEXT_WIDTH, force_jupyter=False, color_system=None))
    return file.getvalue()


def curves_of(metrics: Iterable[Mapping[str, float]]) -> dict[str, Curve]:
    """Return the curves of a list of metrics, one mapping per step."""
    rows = list(metrics)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: (range(len(rows)), [row.get(name) for row in rows]) for name in names}


def _table(facts: Mapping[str, Any]) -> str:
    cell = 'style="text-align:left;padding:1px 12px 1px 0;vertical-align:top"'
    lines = [
        f"<tr><th {cell}>{_text(name)}</th><td {cell}>{_text(value)}</td></tr>"
        for name, value in facts.items()
        if value is not None
    ]
    return f'<table style="border:none">{"".join(lines)}</table>'


def _curve(name: str, steps: Sequence[float], values: Sequence[float | None]) -> str:
    points = [(s, v) for s, v in zip(steps, values, strict=True) if v is not None and math.isfinite(v)]
    if not points:
        return ""
    first, last = points[0][1], points[-1][1]
    label = f"{name}: {_number(first)} → {_number(last)}"
    thinned = [*points[:: math.ceil(len(points) / MAX_POINTS)], points[-1]]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _scaled(thinned))
    return (
        f'<figure style="display:inline-block;margin:6px 18px 0 0"><figcaption>{_text(label)}</figcaption>'
        f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(label)}">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg></figure>'
    )


def _scaled(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Scale points to picture coordinates, so that the extremes of each axis lie on the margins."""

    def place(value: float, low: float, high: float, size: int) -> float:
        # Halve first: the difference between the two largest floats would overflow.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high / 2 > low / 2 else 0.5
        return EDGE + share * (size - 2 * EDGE)

    steps, values = zip(*points, strict=True)
    low, high = min(values), max(values)
    return [
        (place(step, steps[0], steps[-1], WIDTH), HEIGHT - place(value, low, high, HEIGHT)) for step, value in points
    ]


def _cell(value: Any) -> str:
    return "" if value is None else _number(value) if isinstance(value, float) else _text(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(value: Any) -> str:
    return escape(visible_line(str(value)))
