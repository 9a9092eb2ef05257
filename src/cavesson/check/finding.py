"""The results of a check."""

from collections.abc import Iterator
from dataclasses import dataclass

from cavesson.doctor.finding import Severity


@dataclass(frozen=True)
class Finding:
    """A problem that will or may occur; severities are the doctor's."""

    check: str
    severity: Severity
    title: str
    cause: str
    fix: str
    seen: float | str | None = None
    """the number, or what stands there instead of one"""
    healthy: str = ""
    """what the number means and where it is healthy"""
    source: str = ""


@dataclass(frozen=True)
class Fine:
    """A check without a finding."""

    check: str
    seen: float | str
    healthy: str


@dataclass(frozen=True)
class Skipped:
    """A check that could not be done, and why."""

    check: str
    reason: str


Result = Finding | Fine | Skipped
Results = Iterator[Result]
