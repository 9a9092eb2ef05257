"""The common part of all training loops: steps, checkpoints, and resuming from a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.algorithms.settings import CheckpointSettings
from cavesson.errors import SignalledError, StoppedError
from cavesson.integrations.trackers import Trackers
from cavesson.record.recorder import Recorder
from cavesson.train.checkpoint import Checkpoint, save
from cavesson.train.signals import Signals
from cavesson.train.update import Learner

Report = Callable[[int, dict[str, float]], None]
"""Called after every step with its number and its metrics."""


@dataclass
class Trainer(ABC):
    """All parts of one run, and its state between two steps."""

    settings: RolloutRun | ExampleRun
    learner: Learner
    tokenizer: PreTrainedTokenizerBase
    steps: int
    """of the whole run"""
    recorder: Recorder | None
    """None on all processes but the main one"""
    trackers: Trackers | None
    """None on all processes but the main one"""
    next_step: int
    signals: Signals = field(default_factory=Signals, kw_only=True)
    """what asks for the end of the run"""

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Do one training step and return its metrics."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return the state that the next step depends on, besides weights and optimiser, as plain values."""

    @abstractmethod
    def load_state(self, checkpoint: Checkpoint) -> None:
        """Restore the state from a checkpoint."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Compute what all steps need, before the next step; the run's folder exists."""

    @abstractmethod
    def finish(self, folder: Path) -> dict[str, float]:
        """Save the model to `folder`/model and return the metrics of its evaluation."""

    @property
    @abstractmethod
    def model(self) -> PreTrainedModel | Any:
        """The model that is saved at the end: a Hugging Face model, wrapped by PEFT if it has adapters."""

    def describe(self) -> dict[str, Any]:
        """Return facts about the data and the model for run.json."""
        return {}

    def reason_to_stop(self) -> str | None:
        """Return why the run must stop before the next step, or None; the same on all processes."""
        return None

    def notes(self) -> list[str]:
        """Return notes for the user, shown before the first step."""
        return []

    def run(self, folder: Path, report: Report) -> dict[str, float]:
        """Do the remaining steps, with checkpoints at intervals and at the end, and save the model.

        Returns:
            The metrics of the trained model.

        Raises:
            StoppedError: there was a reason to stop, or a signal; the checkpoint has been written.
        """
        self.prepare(folder)
        checkpoint: CheckpointSettings = self.settings.checkpoint
        while self.next_step < self.steps:
            with self.signals.deferred():
                metrics = self.step(self.next_step)
                self._log(self.next_step, metrics)
                report(self.next_step, metrics)
                self.next_step += 1
                reason, signal = self.reason_to_stop(), self.signal()
                due = checkpoint.every and self.next_step % checkpoint.every == 0
                if due or self.next_step == self.steps or reason or signal:
                    self.save(folder)
            if self.next_step < self.steps:
                self._stop(reason, signal)
        final = self.finish(folder)
        if final:
            self._log(self.steps, final)
        return final

    def signal(self) -> int:
        """Return the signal that asked any process to stop, or 0 if there was none. All processes must call this."""
        return int(self.learner.processes.combine({"signal": float(self.signals.asked)}, max)["signal"])

    def _stop(self, reason: str | None, signal: int) -> None:
        """Stop the run between two steps if there is a signal or a reason; the checkpoint has been written.

        Raises:
            SignalledError: there is a signal.
            StoppedError: there is a reason to stop.
        """
        place = f"{self.next_step} of {self.steps} steps"
        if signal:
            raise SignalledError(f"interrupted after {place}; the checkpoint is complete", signal)
        if reason:
            raise StoppedError(f"stopped after {place}\n{reason}\nThe checkpoint is complete")

    def _log(self, step: int, metrics: dict[str, float]) -> None:
        if self.recorder is not None:
            self.recorder.metrics(step, metrics)
        if self.trackers is not None:
            self.trackers.log(step, metrics)

    def save(self, folder: Path, tensors: Mapping[str, Tensor] | None = None, **inside: Any) -> None:
        """Write a checkpoint of the state between two steps, or `inside` a step, with the tensors that it uses."""
        if self.recorder is not None:
            self.recorder.flush()  # a checkpoint must never include a step that is not in the record
        if self.learner.processes.is_main:
            weights: dict[str, Tensor] = dict(self.learner.optimizer.parameters)
            checkpoint = Checkpoint(
                self.next_step, {**self.state(), **inside}, weights, self.learner.optimizer.state(), tensors or {}
            )
            save(folder, checkpoint, self.settings.checkpoint.keep)
        self.learner.processes.wait()

    @torch.no_grad()
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore weights, optimiser and state from a checkpoint."""
        optimizer = self.learner.optimizer
        for name, parameter in optimizer.parameters.items():
            parameter.copy_(checkpoint.weights[name])
        optimizer.load({name: tensor.to(self.learner.device) for name, tensor in checkpoint.optimizer.items()})
        self.next_step = checkpoint.step
        self.load_state(checkpoint)
