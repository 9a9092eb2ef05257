"""The doctor during training: it reports findings or stops the run."""

from pathlib import Path

from cavesson.algorithms.settings import DoctorSettings
from cavesson.command_line import command_line
from cavesson.doctor.watch import Watch
from cavesson.doctor.words import language
from cavesson.errors import StoppedError, print_error
from cavesson.findings.finding import Finding
from cavesson.findings.report import described, line
from cavesson.findings.stored import findings_file, read_findings
from cavesson.record import open as open_run
from cavesson.record.read.index_folder import index_folder
from cavesson.train.log import LOGGER
from cavesson.train.loop import Callback, Trainer

MAX_LINES = 2
"""Findings that are named at the end of a run."""


class Doctor(Callback):
    """Applies the doctor's rules to a run while it trains, on the main process.

    The finding of each rule is reported once, and stops the run at most once: `reported` are the rules whose findings
    have been reported, including before the run was resumed.
    """

    def __init__(self, settings: DoctorSettings, reported: set[str]) -> None:
        self.settings = settings
        self.reported = reported
        self.watch: Watch | None = None

    def on_start(self, trainer: Trainer) -> None:
        if trainer.learner.processes.is_main:
            self.start(trainer.folder)

    def start(self, folder: Path) -> None:
        """Watch the run in a folder."""
        self.watch = _watch(self.settings, folder)

    def on_step(self, trainer: Trainer) -> None:
        reason = self.reason_to_stop(trainer.next_step)
        if self.settings.stops:
            reason = trainer.learner.processes.of_main(reason)
        if reason and trainer.stop is None:
            done = f"{trainer.next_step} of {trainer.end} steps"
            trainer.stop = StoppedError(f"stopped after {done}\n{reason}\nThe checkpoint is complete")

    def reason_to_stop(self, step: int) -> str | None:
        """Return the findings that must stop the run before `step`, or None; print other new findings."""
        if self.watch is None or not self.watch.poll(str(step)):
            return None
        new = [finding for finding in _found(self.watch, self.settings) if self._names(finding) - self.reported]
        self.reported.update(*map(self._names, new))
        grave = [finding for finding in new if self.settings.answer(finding) == "stop"]
        for finding in new:
            if finding not in grave:
                LOGGER.warning("doctor: %s", described(finding))
                print_error(f"doctor: {described(finding)}")
        return "\n".join(described(finding, self.settings.stopping(finding)) for finding in grave) or None

    def _names(self, finding: Finding) -> set[str]:
        """Return the rules that are reported with a finding: its own, and those of consequences that stop the run."""
        return {finding.rule, *self.settings.stopping(finding)}


def verdict(settings: DoctorSettings, folder: Path) -> list[str]:
    """Examine a run that has ended, and return lines that report the findings."""
    watch = _watch(settings, folder)
    if not watch.look("end"):
        return [f"doctor   could not read the record; {command_line('doctor', watch.run)} says why"]
    seen = read_findings(watch.file)
    judged = seen.summary.get(language().name, "") if seen else ""
    found = _found(watch, settings)
    lines = [f"         {line(finding)}; change: {finding.fix}" for finding in found[:MAX_LINES]]
    return [f"doctor   {judged}", *lines, f"         {len(found)} to look at: {command_line('doctor', watch.run)}"]


def _watch(settings: DoctorSettings, folder: Path) -> Watch:
    run = open_run(folder, allow_remote=True)
    place = index_folder(run)
    place.mkdir(parents=True, exist_ok=True)
    # The first examination takes about a second; it is delayed until that is within the same share of the run time.
    return Watch(run.folder, findings_file(place), settings.share, after=1 / settings.share)


def _found(watch: Watch, settings: DoctorSettings) -> list[Finding]:
    seen = read_findings(watch.file)
    found = seen.findings[language().name] if seen else ()
    return [finding for finding in found if settings.answer(finding) != "ignore"]
