"""The results of a check."""

from collections.abc import Iterator
from dataclasses import dataclass

from cavesson.doctor.finding import Severity


@dataclass(frozen=True)
class Problem:
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

    def unless(self, is_healthy: bool) -> "Problem | Fine":
        """Return the problem, or, if the number is healthy, the same check without a finding."""
        assert self.seen is not None
        return Fine(self.check, self.seen, self.healthy) if is_healthy else self


@dataclass(frozen=True)
class Fine:
    """A check without a finding."""

    check: str
    seen: float | str
    healthy: str


@dataclass(frozen=True)
class SkippedCheck:
    """A check that could not be done, and why."""

    check: str
    reason: str


Result = Problem | Fine | SkippedCheck
Results = Iterator[Result]
