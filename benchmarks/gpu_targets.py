"""The targets of docs/gpu.md, and whether what gpu.py has measured meets them."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

Measured = Mapping[str, Mapping[str, Sequence[float]]]
"""Figures by the names of lines"""


class Target(NamedTuple):
    """What the median of a figure should be: at most a number, or at least."""

    line: str
    figure: str
    number: float
    is_most: bool = True


TARGETS = (
    Target("grpo-0.5b", "learning, s", 0.45),
    Target("grpo-7b", "learning, s", 3.2),
    Target("grpo-7b", "utilisation, %", 50, is_most=False),
    Target("grpo-1.5b", "utilisation, %", 45, is_most=False),
    Target("grpo-0.5b", "sampled tokens/s", 25_000, is_most=False),
    Target("grpo-7b", "sampled tokens/s", 8_500, is_most=False),
    Target("mixed", "mixed beside equal", 1.15),
    Target("grpo-0.5b", "first, s more", 60),
)
TIMES_TRL = 6.0
"""TRL's step divided by ours, at least"""
OFF = 0.10
"""How far a predicted peak may be from the measured one"""


def verdicts(measured: Measured) -> Iterator[str]:
    """Yield a line for every target whose figures were measured."""
    for target in TARGETS:
        values = measured.get(target.line, {}).get(target.figure)
        if values:
            is_met = median(values) <= target.number if target.is_most else median(values) >= target.number
            limit = f"at {'most' if target.is_most else 'least'} {target.number:g}"
            yield f"{target.line}: {target.figure} {median(values):.4g}, target {limit}: {_met(is_met)}"
    theirs, ours = (measured.get(line, {}) for line in ("trl-0.5b", "grpo-0.5b"))
    if theirs and ours:
        times = median(theirs["step without optimiser, s"]) / median(ours["step, s"])
        yield f"trl-0.5b: {times:.2f} times our step, target at least {TIMES_TRL:g}: {_met(times >= TIMES_TRL)}"
    for line, figures in measured.items():
        for name in (name for name in figures if name.endswith("predicted, GB")):
            peak = figures.get(name.replace("predicted, GB", "peak memory, GB"))
            if peak:
                off = median(figures[name]) / median(peak) - 1
                yield f"{line}: {name} {off:+.1%} of the peak, target within {OFF:.0%}: {_met(abs(off) <= OFF)}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"
