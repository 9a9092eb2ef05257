"""Applies the rules to a run and separates causes from consequences."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Phrase, Reading, Skipped
from cavesson.doctor.rule import Rule

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A problem that a rule found."""

    rule: Rule
    reading: Reading
    explains: tuple[str, ...] = ()
    """Names of the rules whose findings are folded under this one."""
    cause: bool = True
    """False: another finding explains it."""

    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``note``."""
        return self.rule.severity


@dataclass(frozen=True)
class Diagnosis:
    """The result of applying the rules to a run."""

    findings: tuple[Finding, ...]
    """Causes first, the most certain first; then what they explain."""
    healthy: tuple[tuple[Rule, Reading], ...]
    skipped: tuple[Skipped, ...]

    @property
    def causes(self) -> tuple[Finding, ...]:
        """The findings that no other finding explains."""
        return tuple(finding for finding in self.findings if finding.cause)


def diagnose(data: RunData, rules: Sequence[Rule]) -> Diagnosis:
    """Apply rules to a run; the rules must be ordered so that causes come before consequences."""
    sick, healthy, skipped = [], [], []
    for rule in rules:
        out = _skipped(data, rule)
        reading = None if out else _read(data, rule)
        if reading is None or np.isnan(reading.seen):
            skipped.append(out or Skipped(rule.name, rule.number, Phrase("the run has nothing to measure")))
        elif reading.sick:
            sick.append((rule, reading))
        else:
            healthy.append((rule, reading))
    return Diagnosis(tuple(_folded(sick)), tuple(healthy), tuple(skipped))


def _read(data: RunData, rule: Rule) -> Reading | None:
    """Apply a rule without numerical warnings: a record can hold any values, and NaN means not measurable."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return rule.statistic(data)


def _skipped(data: RunData, rule: Rule) -> Skipped | None:
    def because(reason: str, **words: str | float) -> Skipped:
        return Skipped(rule.name, rule.number, Phrase(reason), words)

    if rule.algorithms and data.algorithm is not None and data.algorithm not in rule.algorithms:
        algorithms = ", ".join(rule.algorithms)
        return because(
            "applies to {algorithms}; this run is {algorithm}", algorithms=algorithms, algorithm=data.algorithm
        )
    missing = [need for need in rule.needs if not any(data.has(one) for one in need.split("|"))]
    if missing:
        return because("not recorded: {what}", what=", ".join(need.replace("|", " | ") for need in missing))
    steps = len(data.rows.steps)
    if steps < rule.min_steps:
        return because("needs {least} steps; the record has {steps}", least=float(rule.min_steps), steps=float(steps))
    return None


def _folded(sick: Sequence[tuple[Rule, Reading]]) -> list[Finding]:
    """Return the findings, each consequence under the first cause that explains it, directly or through others."""
    place = {rule.name: i for i, (rule, _) in enumerate(sick)}
    above: dict[int, int] = {}
    for i, (rule, reading) in enumerate(sick):
        for name in rule.explains:
            j = place.get(name)
            if j is not None and j != i and not _before(sick[j][1], reading) and not _is_above(j, i, above):
                above[j] = min(i, above.get(j, i))
    under: dict[int, list[str]] = {}
    for j in sorted(above):
        under.setdefault(_top(j, above), []).append(sick[j][0].name)
    found = [Finding(r, reading, tuple(under.get(i, ())), i not in above) for i, (r, reading) in enumerate(sick)]
    return sorted(found, key=lambda finding: (not finding.cause, SEVERITIES.index(finding.severity)))


def _before(one: Reading, other: Reading) -> bool:
    """Return whether one problem clearly began before the other, so that the other cannot be its cause."""
    if one.since is None or other.since is None:
        return False
    return one.since + 5 < other.since


def _is_above(j: int, i: int, above: dict[int, int]) -> bool:
    while i in above:
        i = above[i]
        if i == j:
            return True
    return False


def _top(j: int, above: dict[int, int]) -> int:
    while j in above:
        j = above[j]
    return j


def worst(findings: Iterable[Finding]) -> str | None:
    """Return the highest severity among the findings; None if there are none."""
    grave = [SEVERITIES.index(finding.severity) for finding in findings]
    return SEVERITIES[min(grave)] if grave else None
