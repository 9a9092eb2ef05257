"""What a run does beside training: log metrics, report progress, and write checkpoints."""

from cavesson.algorithms.settings import CheckpointSettings
from cavesson.errors import StoppedError, first_line
from cavesson.integrations.trackers import Trackers
from cavesson.train.checkpoint import save
from cavesson.train.loop import Callback, Report, Trainer
from cavesson.train.update import Metrics

UNRECORDED = "unrecorded"
"""The part of a run's folder with what could not be written to the record."""


class Log(Callback):
    """Writes metrics to the record and sends them to trackers, on the main process; `trackers` is None on others."""

    def __init__(self, trackers: Trackers | None) -> None:
        self.trackers = trackers

    def on_metrics(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if trainer.recorder is not None and trainer.learner.processes.is_main:
            trainer.recorder.metrics(step, metrics)
        if self.trackers is not None:
            self.trackers.log(step, metrics)


class Reports(Callback):
    """Calls a function with the metrics of every step, and keeps them."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.metrics: list[Metrics] = []
        """of every step so far, in order"""

    def on_metrics(self, trainer: Trainer, step: int, metrics: Metrics) -> None:
        if step < trainer.steps:
            self.metrics.append(metrics)
            self.report(step, dict(metrics))


class Reachable(Callback):
    """Stops a run whose record can no longer be written to its place."""

    def on_step(self, trainer: Trainer) -> None:
        lost = lost_record(trainer)
        if lost is not None and trainer.stop is None:
            trainer.stop = StoppedError(f"stopped after {trainer.next_step} of {trainer.steps} steps: {lost}")


def lost_record(trainer: Trainer) -> str | None:
    """Return what has become of a record whose place a process could not reach; None if all could.

    All processes must call this together.
    """
    recorder = trainer.recorder
    error = None if recorder is None else recorder.unreachable
    said = None if recorder is None or error is None else f"{recorder.place} cannot be reached: {first_line(error)}"
    found = next((line for line in trainer.learner.processes.of_all(said) if line is not None), None)
    way_on = f"The checkpoint is complete; resuming adds the end of the record, {trainer.folder / UNRECORDED}"
    return None if found is None else f"{found}\n{way_on}"


class Checkpoints(Callback):
    """Writes checkpoints at intervals, before a stop, and at the end.

    Args:
        settings: intervals, and how many checkpoints are kept.
        updates: optimiser steps between checkpoints inside a step; 0 = none.
    """

    def __init__(self, settings: CheckpointSettings, updates: int) -> None:
        self.settings = settings
        self.updates = updates

    def on_step(self, trainer: Trainer) -> None:
        every = self.settings.every
        is_due = every and trainer.next_step % every == 0
        if is_due or trainer.next_step == trainer.steps or trainer.stop is not None:
            self._save(trainer)

    def on_update(self, trainer: Trainer, done: int) -> None:
        if trainer.stop is not None or (self.updates and done % self.updates == 0):
            self._save(trainer)

    def on_failed_reward(self, trainer: Trainer) -> None:
        if trainer.next_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        trainer.learner.processes.enter("write the checkpoint")
        if trainer.recorder is not None:
            trainer.recorder.flush()  # a checkpoint must never include a step that is not in the record
        save(trainer.folder, trainer.checkpoint(), self.settings.keep, trainer.learner.processes)
