"""What a check says."""

from collections.abc import Iterator
from dataclasses import dataclass

from cavesson.doctor.finding import Severity


@dataclass(frozen=True)
class Finding:
    """Something that will go wrong, or may; severities are the doctor's."""

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
    """Something that was looked at and is as it should be."""

    check: str
    seen: float | str
    healthy: str


@dataclass(frozen=True)
class Skipped:
    """Something that could not be looked at, and why."""

    check: str
    reason: str


Result = Finding | Fine | Skipped
Results = Iterator[Result]
