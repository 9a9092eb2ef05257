"""A run that is opened from Python: its record, what the doctor finds in it, and its charts."""

from typing import TYPE_CHECKING

from cavesson.analysis.comparison import MetricComparison, compared
from cavesson.analysis.rollout import RolloutView, viewed
from cavesson.record import Run
from cavesson.record import open as open_record
from cavesson.record.read.reader import require
from cavesson.record.storage import Location

if TYPE_CHECKING:
    from cavesson.analysis.chart import Chart
    from cavesson.analysis.finding_list import FindingList


def open(run: Location, allow_remote: bool = False) -> "RunAnalysis":
    """Open a run for reading. This never runs code, and reads nothing outside the folder without ``allow_remote``.

    What a killed process of this machine had recorded and not yet written to segments is added to the record first.

    Args:
        run: A run folder, or a URL such as ``s3://bucket/run``.
        allow_remote: Whether the record may be at another location that the folder names, in object storage.

    Raises:
        UserError: ``run.json`` is missing or unreadable, the location cannot be reached, or the record is at another
            place.
    """
    record = open_record(run, allow_remote)
    return RunAnalysis(record.storage, record.info)


class RunAnalysis(Run):
    """A run with its findings, charts and comparisons; a notebook displays what they return."""

    def findings(self, language: str | None = None) -> "FindingList":
        """Return what the doctor finds, causes before their consequences.

        Args:
            language: ``en``, ``zh`` or ``vi``; by default from LANG.
        """
        from cavesson.analysis.finding_list import found_in  # the rules take a while to import

        return found_in(self, language)

    def plot(self, *metrics: str, points: int = 100, findings: bool = True) -> "Chart":
        """Draw metrics over the steps, one below the other, and where the findings begin as vertical lines.

        Args:
            metrics: Names from ``steps()``; by default the main ones that the run has.
            points: The most points of a curve. A run with more steps is drawn as means of consecutive steps, with a
                band of one standard deviation of these steps to each side.
            findings: Whether to diagnose the run and to mark its findings.

        Returns:
            A matplotlib figure.

        Raises:
            UserError: matplotlib is not installed, or the run has no such metric.
        """
        require("matplotlib")
        from cavesson.analysis.chart import curves_of, drawn

        curves = curves_of(self, metrics)
        return drawn(curves, points, self.findings() if findings else [])

    def compare(self, other: Location | Run, last: int = 1) -> MetricComparison:
        """Compare the metrics of this run with those of another.

        Args:
            other: The other run, its folder or its URL.
            last: How many of the last values of each metric are averaged.
        """
        return compared(self, other if isinstance(other, Run) else open(other), last)

    def rollout(self, step: int, sample: int) -> RolloutView:
        """Return one rollout, or raise a UserError that the record does not have it."""
        return viewed(self, step, sample, super().rollout(step, sample))
