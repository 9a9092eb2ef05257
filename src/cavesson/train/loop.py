"""The loop over training steps, whatever a step does, and the callbacks that hang on it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.errors import SignalledError, StoppedError, UserCodeError, UserError
from cavesson.models.settings import ModelSettings
from cavesson.models.sharding import whole
from cavesson.record.write.recorder import Recorder
from cavesson.train.checkpoint import Checkpoint
from cavesson.train.kept import KeptBatches
from cavesson.train.machine import Machine
from cavesson.train.metrics import Clock
from cavesson.train.signals import Signals
from cavesson.train.update import Learner, Metrics

Report = Callable[[int, Metrics], None]
"""Called after every step with its number and its metrics."""


class Callback:
    """What a run does beside training. All processes call the same callbacks in the same order."""

    def on_start(self, trainer: "Trainer") -> None:
        """Called before the next step; the run's folder exists."""

    def on_metrics(self, trainer: "Trainer", step: int, metrics: Metrics) -> None:
        """Called with the metrics of every step, and with those of the trained model, whose step is `trainer.end`."""

    def on_update(self, trainer: "Trainer", done: int) -> None:
        """Called inside a step after every optimiser step but the last; `done` is the number of those of the step."""

    def on_step(self, trainer: "Trainer") -> None:
        """Called between two steps; setting `trainer.stop` ends the run before `trainer.next_step`."""

    def on_failed_reward(self, trainer: "Trainer") -> None:
        """Called if a reward failed, which ends the run; the state is that before the step."""


@dataclass(kw_only=True)
class Trainer(ABC):
    """All parts of one run, and its state between two steps."""

    folder: Path
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    model_settings: ModelSettings
    seed: int
    batch_size: int
    """rows per step, over all processes"""
    steps: int
    """of the whole run, over which schedules go"""
    fingerprint: str
    """of the model before training"""
    skeleton: Any = None
    """the model without its weights, if they are sharded"""
    remarks: Sequence[str] = ()
    """notes for the user from the building of the run"""
    next_step: int = 0
    until: int | None = None
    """the step before which a fork ends; None = it does all steps"""
    recorder: Recorder | None = None
    """of this process; None before the run has begun"""
    machine: Machine | None = None
    """what measures the machine; None on all processes but the main one, and before the run has begun"""
    signals: Signals = field(default_factory=Signals)
    """what asks for the end of the run"""
    callbacks: Sequence[Callback] = ()
    stop: UserError | None = None
    """why the run must stop, raised when the checkpoint has been written"""

    @property
    def end(self) -> int:
        """The step before which training ends."""
        return self.steps if self.until is None else self.until

    @abstractmethod
    def step(self, step: int) -> Metrics:
        """Do one training step and return its metrics."""

    def state(self) -> tuple[dict[str, Any], KeptBatches]:
        """Return the state that the next step depends on, besides weights and optimiser.

        These are plain values, the same on all processes, and this process's part of rollouts. All processes must call
        this together.
        """
        return {}, {}

    def load_state(self, checkpoint: Checkpoint) -> None:  # noqa: B027  # a trainer need not have such a state
        """Restore the state from a checkpoint."""

    def prepare(self) -> None:  # noqa: B027  # most trainers need nothing beforehand
        """Compute what all steps need, before the next step; the run's folder exists."""

    @abstractmethod
    def finish(self) -> Metrics:
        """Save the model to `folder`/model and return the metrics of its evaluation."""

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel | Any:
        """The model that is saved at the end: a Hugging Face model, wrapped by PEFT if it has adapters."""

    @property
    def saves_base(self) -> bool:
        """Whether the model that is saved at the end has more than adapters."""
        return self.model_settings.lora is None

    def auto_values(self) -> dict[str, Any]:
        """Return what was chosen for settings that are "auto" when the run was built, by their dotted names."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Return facts about the data and the model for run.json."""
        return {}

    def notes(self) -> list[str]:
        """Return notes for the user, shown before the first step."""
        return list(self.remarks)

    def run(self, callbacks: Sequence[Callback]) -> Metrics:
        """Do the remaining steps and save the model.

        Returns:
            The metrics of the trained model.

        Raises:
            StoppedError: there was a reason to stop, or a signal; the callbacks have been called before.
            UserCodeError: a reward, or a function that reports metrics, failed; the callbacks have been called before.
        """
        self.callbacks = callbacks
        failed: UserError | None = None
        self.learner.processes.enter("prepare the run")
        self.prepare()
        self._call(lambda callback: callback.on_start(self))
        while self.next_step < self.end:
            with self.signals.deferred():
                try:
                    metrics = self.step(self.next_step)
                except UserCodeError:
                    self._call(lambda callback: callback.on_failed_reward(self))
                    raise
                failed = self._log(metrics | (self.machine.metrics() if self.machine else {}))
                self.next_step += 1
                self._heed_signal(f"after {self.next_step} of {self.end} steps")
                self.stop = failed or self.stop
                self._call(lambda callback: callback.on_step(self))
            stop = failed or self.stop
            if stop is not None and self.next_step < self.end:
                raise stop
        final = self.finish()
        failed = (self._log(final) if final else None) or failed
        if failed is not None:
            raise failed
        return final

    def _call(self, hook: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            hook(callback)

    def clock(self, step: int) -> Clock:
        """Return a clock for the stages of a step, which tells the watchdog of each."""
        return Clock(lambda stage: self.learner.processes.enter(f"step {step}, {stage}"))

    def _log(self, metrics: Metrics) -> UserError | None:
        """Report the metrics of a step; return what a function of the user raised, in any process, to end the run."""
        processes = self.learner.processes
        processes.enter(f"report step {self.next_step}")
        try:
            processes.agreed(lambda: self._call(lambda callback: callback.on_metrics(self, self.next_step, metrics)))
        except (UserCodeError, StoppedError) as error:
            return error
        return None

    def between_updates(self, done: int, total: int) -> None:
        """Call the callbacks after `done` of a step's `total` optimiser steps; after a signal, raise a StoppedError."""
        self._heed_signal(f"in step {self.next_step}, after {done} of its {total} updates")
        self._call(lambda callback: callback.on_update(self, done))
        if self.stop is not None:
            raise self.stop

    def _heed_signal(self, place: str) -> None:
        """Set `stop` if a signal asked any process to stop."""
        asked = {"signal": float(self.signals.asked)}
        signal = int(self.learner.processes.combine(asked, max)["signal"])
        if signal:
            self.stop = SignalledError(f"interrupted {place}; the checkpoint is complete", signal)

    def checkpoint(self) -> Checkpoint:
        """Return the state between two steps, or inside one that has begun.

        All processes must call this together; weights may be sharded.
        """
        optimizer = self.learner.optimizer
        state, batches = self.state()
        return Checkpoint(self.next_step, state, optimizer.masters, optimizer.state(), batches)

    def whole_model(self) -> Any:
        """Return the model with the weights that are saved on the main process, and None on all others.

        All processes must call this together.
        """
        self.learner.processes.enter("save the model")
        return whole(self.model, self.skeleton, self.learner.processes.is_main, self.saves_base, self.folder)

    def close(self) -> None:  # noqa: B027  # most trainers hold nothing that must be released
        """Release what the run holds besides memory; called when it has ended, or could not start."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimiser and state from a checkpoint."""
        self.learner.optimizer.load(checkpoint.weights, checkpoint.optimizer)
        self.next_step = checkpoint.step
        self.load_state(checkpoint)
