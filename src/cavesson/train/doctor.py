"""The doctor during training: it reports findings or stops the run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cavesson.command_line import command_line
from cavesson.doctor.findings_file import Finding, findings_file, read_findings
from cavesson.doctor.settings import DoctorSettings
from cavesson.doctor.watch import Watch
from cavesson.doctor.words import language
from cavesson.record import open as open_run
from cavesson.record.index_folder import index_folder
from cavesson.train.log import LOGGER

MOST_LINES = 2
"""Findings that are named at the end of a run."""


@dataclass
class Attendance:
    """Applies the doctor's rules to a run while it trains.

    Args:
        settings: determine what happens at a finding.
        folder: of the run.
        told: rules whose findings have been reported, including before the run was resumed. The finding of each rule is
            reported once, and stops the run at most once.
    """

    settings: DoctorSettings
    folder: Path
    told: set[str]

    def __post_init__(self) -> None:
        self.watch = _watch(self.settings, self.folder)

    def reason_to_stop(self, step: int) -> str | None:
        """Return the findings that must stop the run before `step`, or None; print other new findings."""
        if not self.watch.tend(str(step)):
            return None
        new = [finding for finding in _found(self.watch, self.settings) if self._names(finding) - self.told]
        self.told.update(*map(self._names, new))
        grave = [finding for finding in new if self.settings.answer(finding) == "stop"]
        for finding in new:
            if finding not in grave:
                LOGGER.warning("doctor: %s", _described(finding))
                print(f"doctor: {_described(finding)}", file=sys.stderr)
        return "\n".join(_described(finding, self.settings.stopping(finding)) for finding in grave) or None

    def _names(self, finding: Finding) -> set[str]:
        """Return the rules that are reported with a finding: its own, and those of consequences that stop the run."""
        return {finding.id, *self.settings.stopping(finding)}


def verdict(settings: DoctorSettings, folder: Path) -> list[str]:
    """Examine a run that has ended, and return lines that report the findings."""
    watch = _watch(settings, folder)
    if not watch.look("end"):
        return [f"doctor   could not look at the record; {command_line('doctor', folder)} says why"]
    found = _found(watch, settings)
    if not found:
        return ["doctor   found nothing wrong"]
    lines = [f"doctor   {_title(finding)}; change: {finding.fix}" for finding in found[:MOST_LINES]]
    return [*lines, f"         {len(found)} found in all: {command_line('doctor', folder)}"]


def _watch(settings: DoctorSettings, folder: Path) -> Watch:
    place = index_folder(open_run(folder))
    place.mkdir(parents=True, exist_ok=True)
    # The first examination takes about a second; it is delayed until that is within the same share of the run time.
    return Watch(str(folder), findings_file(place), settings.share, after=1 / settings.share)


def _found(watch: Watch, settings: DoctorSettings) -> list[Finding]:
    seen = read_findings(watch.file)
    found = seen.found[language().name] if seen else ()
    return [finding for finding in found if settings.answer(finding) != "ignore"]


def _described(finding: Finding, explains: Sequence[str] = ()) -> str:
    follows = f" Explains: {', '.join(explains)}." if explains else ""
    return f"{_title(finding)}. {finding.text}{follows} Change: {finding.fix}"


def _title(finding: Finding) -> str:
    since = f" since step {finding.steps[0]}" if finding.steps else ""
    return f"{finding.severity} {finding.id}{since}: {finding.title}"
