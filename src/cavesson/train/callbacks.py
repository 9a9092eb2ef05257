"""What a run does beside training: log metrics, report progress, and write checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager

from cavesson.algorithms.settings import CheckpointSettings
from cavesson.errors import StoppedError, UserCodeError, UserError, user_code
from cavesson.integrations.trackers import Trackers
from cavesson.train.checkpoint import save
from cavesson.train.loop import Callback, Report, Trainer
from cavesson.train.update import Metrics


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Convert whatever the block raises to a UserCodeError, after which a run is saved; a StoppedError stays one."""
    try:
        with user_code(what):
            yield
    except (UserCodeError, StoppedError):
        raise
    except UserError as error:
        raise UserCodeError(str(error)) from error


def guarded(report: Report) -> Report:
    """Return a user's function that raises a UserCodeError whatever it raises."""

    def call(step: int, metrics: Metrics) -> None:
        with _reporting("the function that reports steps"):
            report(step, metrics)

    return call


class Log(Callback):
    """Writes metrics to the record and sends them to trackers, on the main process; `trackers` is None on others."""

    def __init__(self, trackers: Trackers | None) -> None:
        self.trackers = trackers

    def on_metrics(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if trainer.recorder is not None and trainer.learner.processes.is_main:
            trainer.recorder.metrics(step, metrics)
        if self.trackers is not None:
            with _reporting("a tracker of the run"):
                self.trackers.log(step, metrics)


class Reports(Callback):
    """Calls a function with the metrics of every step, and keeps them if `keep` is set."""

    def __init__(self, report: Report, keep: bool) -> None:
        self.report, self.keep = report, keep
        self.metrics: list[Metrics] = []
        """of every step so far, in order"""

    def on_metrics(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if step < trainer.end:
            if self.keep:
                self.metrics.append(metrics)
            self.report(step, dict(metrics))


class Checkpoints(Callback):
    """Writes checkpoints at intervals, before a stop, and at the end.

    Inside a step, there are `updates` optimiser steps between checkpoints; 0 = none.
    """

    def __init__(self, settings: CheckpointSettings, updates: int) -> None:
        self.settings, self.updates = settings, updates

    def on_step(self, trainer: Trainer) -> None:
        every = self.settings.every
        is_due = every and trainer.next_step % every == 0
        if is_due or trainer.next_step == trainer.end or trainer.stop is not None:
            self._save(trainer)

    def on_update(self, trainer: Trainer, done: int) -> None:
        if trainer.stop is not None or (self.updates and done % self.updates == 0):
            self._save(trainer)

    def on_failed_reward(self, trainer: Trainer) -> None:
        if trainer.next_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        processes = trainer.learner.processes
        processes.enter("write the checkpoint")
        if trainer.recorder is not None:
            processes.agreed(trainer.recorder.flush)  # a checkpoint must never include a step that is not in the record
        save(trainer.folder, trainer.checkpoint(), self.settings.keep, processes)
