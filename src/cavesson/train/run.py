"""A run from its first step, or the step at which it resumes, to the finished model."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.command_line import continuation, resume_hint, with_accepted
from cavesson.config import describe
from cavesson.data.template import template_time, templates_at
from cavesson.errors import (
    NoMemoryError,
    NonFiniteError,
    NoRoomError,
    StoppedError,
    TerminatedError,
    UserCodeError,
    UserError,
    no_room,
)
from cavesson.integrations.trackers import Trackers
from cavesson.notebook import curves_of, page
from cavesson.ops.matmul import Choices, using
from cavesson.processes import Processes
from cavesson.record import Lock, write_run
from cavesson.record.run_folder import remove_run
from cavesson.record.storage import check_new_record, reaching
from cavesson.record.write.new_folder import check_free
from cavesson.record.write.writable import check_writable
from cavesson.registry import name_of
from cavesson.rollout.environments import Factory
from cavesson.rollout.rewards.base import RewardFunction
from cavesson.rollout.rewards.table import Reward
from cavesson.text.counting import counted
from cavesson.train.build import Inputs, as_loaded, build
from cavesson.train.by_plan import choices, described, keep, with_choices
from cavesson.train.callbacks import Checkpoints, Log, Reports, guarded
from cavesson.train.checkpoint import latest_of_all
from cavesson.train.description import began, check_same_data, check_same_model, describe_run
from cavesson.train.doctor import Doctor, verdict
from cavesson.train.log import logging_to
from cavesson.train.loop import Callback, Report
from cavesson.train.machine import Machine
from cavesson.train.matmul import choices_of, keep_choices, notes_on_products
from cavesson.train.memory import enough_memory, keep_freed_memory, less_memory, return_freed_memory
from cavesson.train.online import RolloutTrainer
from cavesson.train.progress import Progress
from cavesson.train.recording import Described, Reachable, begin_record, lost_record, recorder_of
from cavesson.train.resuming import changes, end_of_fork, notes_on, own_batches, record_changes, settings_of
from cavesson.train.rollouts import Collector
from cavesson.train.signals import Signals

_CONTINUED = (StoppedError, UserCodeError, NoRoomError, NoMemoryError, KeyboardInterrupt, TerminatedError)
"""Errors after which a run can be continued."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    metrics: list[dict[str, float]]
    """of every step this call did, in order; empty if they were not kept"""
    final: dict[str, float]
    """what was measured of the trained model; empty for algorithms that learn from their own responses"""
    policy: Any
    """what was trained, in its roles; `policy.model` is the Hugging Face model, wrapped by PEFT if it has adapters;
    those of a reward model are merged into its weights when it is saved"""
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        return f"Result({str(self.folder)!r}, {counted(len(self.metrics), 'step')})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        facts = {"steps": len(self.metrics), "model": self.folder / "model"}
        facts |= {name: f"{value:.4g}" for name, value in self.final.items()}
        return page(f"Result of {self.folder}", facts, curves_of(self.metrics))


class Training:
    """A run that has been built and can be started; its parts can be examined before the start.

    Args:
        settings: of the run; they can also name everything below.
        model: a causal language model object, changed in place; needs `tokenizer`. Its dtype and quantization are its
            own, not those of the settings.
        tokenizer: of the model.
        prompts: texts, or columns by name, where one is called `prompt` and the others are passed to the rewards.
        rewards: a function `(prompts, responses, **columns)`, or several, each of which may be a `Reward`
            with a name and a weight.
        environment: a class whose instances answer the policy, or several by name; see docs/environments.md.
        tools: functions that the policy may call.
        resume: resume the run in `settings.run` from its newest intact checkpoint, or from its first step if it has no
            checkpoint or does not exist yet. Its length may change, and so may settings that do not affect the results.
        accept_changes: resume also if the rewards or their source have changed; the run records that.

    Raises:
        UserError: something in the settings or the data is wrong, or another process is writing the run.
    """

    def __init__(
        self,
        settings: RolloutRun | ExampleRun,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prompts: Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
        rewards: RewardFunction | Sequence[Reward | RewardFunction] | None = None,
        environment: Factory | Mapping[str, Factory] | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        resume: bool = False,
        accept_changes: bool = False,
    ) -> None:
        self.settings = settings if model is None else as_loaded(settings, model)
        self._inputs = Inputs(model, tokenizer, prompts, rewards, environment, tools)
        self._begun = resume and (settings.run / "run.json").exists()
        if not self._begun:
            _check_new(settings, resume, accept_changes)
        self._rewards = self._inputs.reward_fingerprints(settings)
        self._changes = changes(self.settings, self._rewards, accept_changes) if self._begun else {}
        self._made = False
        """whether the folder is this process' own, and not one that another has made meanwhile"""
        self._remarks: list[str] = []
        parallel = settings.parallel
        self.processes = Processes(settings.model.device, parallel.shard, parallel.timeout, parallel.offload)
        self.processes.resume_hint = resume_hint(settings.run) if self._begun else None
        self._locks: list[Lock] = []
        """on the run's folder, and on its record if that is elsewhere"""
        try:
            if self._begun and self.processes.is_main:
                self._lock()  # from here on, so that no other process can resume it before this one starts
            self._choices = choices_of(settings.run, self.processes.rank) if self._begun else Choices()
            self._date = began(settings.run) if self._begun else self.processes.of_all(template_time())[0]
            with self.processes.watched(), self._as_begun(), self._enough_memory():
                self._build()
        except BaseException:
            if hasattr(self, "trainer"):
                self.trainer.close()
            self._release()
            raise

    def _build(self) -> None:
        if self.processes.mesh is None:
            keep_freed_memory()
        else:
            return_freed_memory()
        self._chosen, said = choices(self.settings, self._inputs, self.processes, self._begun)
        self._remarks += said
        self.trainer = build(with_choices(self.settings, self._chosen), self._inputs, self.processes)
        self._chosen |= self.trainer.auto_values()
        self.trainer.signals = Signals(quiet=not self.processes.is_main, alone=self.processes.count == 1)
        if not self._begun:
            return
        folder, trainer = self.settings.run, self.trainer
        self.processes.enter("read the checkpoint")
        check_same_model(folder, trainer)
        check_same_data(self.settings, trainer)
        checkpoint = latest_of_all(folder, self._remarks.append, self.processes)
        if checkpoint is not None:
            trainer.restore(own_batches(folder, checkpoint))
        trainer.until = None if "steps" in self._changes else end_of_fork(folder)
        if trainer.next_step > trainer.steps:
            raise UserError(
                f"{folder} has already done {counted(trainer.next_step, 'step')}: it cannot end after {trainer.steps}"
            )
        self._remarks += notes_on(self.settings, self._changes, trainer.next_step, trainer.steps)

    def _lock(self) -> None:
        for place in dict.fromkeys((self.settings.run, self.settings.record_place)):
            with reaching(place):
                self._locks.append(Lock(place))
            self._locks[-1].keep_alive()  # other machines can detect if this process is killed while it loads a model

    def _release(self) -> None:
        recorder = self.trainer.recorder if hasattr(self, "trainer") else None
        is_reachable = recorder is None or recorder.unreachable is None
        for lock in self._locks[1:]:
            with suppress(Exception):  # what cannot be reached keeps an entry whose heartbeats have ended
                lock.release(is_reachable)
        for lock in self._locks[:1]:
            lock.release()

    def __repr__(self) -> str:
        done = f"{self.trainer.next_step} of {self.trainer.end} steps done"
        return f"Training({name_of(self.settings)}, {str(self.settings.run)!r}, {done})"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows, with the settings that differ from the defaults."""
        defaults = {name: default for name, _, default, _ in describe(type(self.settings))}
        now = {name: value for name, _, value, _ in describe(type(self.settings), values=self.settings)}
        changed = {name: value for name, value in now.items() if defaults.get(name) != value}
        facts = {"progress": f"{self.trainer.next_step} of {self.trainer.end} steps", **changed}
        return page(f"Training by {name_of(self.settings)} into {self.settings.run}", facts, {})

    @property
    def collector(self) -> Collector:
        """The object that samples and rewards responses; only for algorithms that do so."""
        assert isinstance(self.trainer, RolloutTrainer)
        return self.trainer.batches.collector

    def run(self, report: Report | None = None, *, keep_metrics: bool = True) -> Result:
        """Train to the last step and save the model.

        Args:
            report: called after every step; None shows a live table.
            keep_metrics: keep the metrics of every step for the result, about 6 KB of memory per step.

        Raises:
            UserError: a number is not finite, a reward or `report` failed, or the disk is full.
            StoppedError: the doctor, Ctrl-C or SIGTERM stopped the run; the checkpoint is complete. If the run can be
                continued after this or another error, a note on the error says how.
        """
        trainer, is_main = self.trainer, self.processes.is_main
        with self.processes.watched(), self._as_begun(), self._opened() as trackers:
            notes = self._notes()
            trainer.machine = Machine(self.processes.device) if is_main else None
            with (
                trainer.signals,
                trainer.machine or nullcontext(),
                Progress(trainer.end, trainer.next_step, notes, quiet=bool(report) or not is_main) as progress,
                trainer.recorder or nullcontext(),
                trackers or nullcontext(),
            ):
                reports = Reports(guarded(report) if report else progress.report, keep_metrics)
                final = trainer.run([Log(trackers), reports, *self._callbacks()])
                if report is None:
                    later = (*trainer.notes(), *notes_on_products(self._choices))
                    progress.finish(final, [note for note in later if note not in notes])
                self.processes.enter("close the record")
            if (lost := lost_record(self.trainer)) is not None:
                raise StoppedError(f"all steps are done, but {lost}")
            self.processes.enter("show the results")
            if report is None and is_main:
                self._show(Console())
            self.processes.wait()
            return Result(self.settings.run, reports.metrics, final, trainer.learner.model, trainer.tokenizer)

    @contextmanager
    def _opened(self) -> Iterator[Trackers | None]:
        """Open the run's folder; an error says how to continue the run, if that is possible."""
        try:
            self.processes.wait()
            trackers = self.processes.agreed(lambda: self._open_folder() if self.processes.is_main else None)
            # Each process records its own rollouts.
            lock = self._locks[-1] if self._locks else None
            self.trainer.recorder = recorder_of(self.settings, self.trainer.next_step, self.processes, lock)
            keep_choices(self._choices, self.settings.run, self.processes.rank)
            self.processes.resume_hint = resume_hint(self.settings.run)
            with logging_to(self.settings.run, self.settings.record_place, self.processes.rank), self._enough_memory():
                yield trackers
        except BaseException as error:
            self._remove_unbegun(error)
            self._add_resume_hint(error)
            if isinstance(error, StoppedError):
                self.processes.wait()  # a launcher ends the other processes as soon as one has ended
            raise
        finally:
            try:
                self.trainer.close()
            finally:
                self._release()

    @contextmanager
    def _as_begun(self) -> Iterator[None]:
        """Use the matrix products and the date with which the run began."""
        with using(self._choices), templates_at(self._date):
            yield

    def _enough_memory(self) -> AbstractContextManager[None]:
        def place() -> str:
            return f"step {self.trainer.next_step}" if hasattr(self, "trainer") else "before the first step"

        return enough_memory(place, less_memory(self.settings))

    def _add_resume_hint(self, error: BaseException) -> None:
        """Add a note to an error that says how to continue the run, if that is possible."""
        way = continuation(self.settings.run) if isinstance(error, _CONTINUED) or no_room(error) else None
        if way is None:
            return
        step = self.trainer.next_step
        if isinstance(error, UserCodeError) and step:
            error.args = (f"{error}\nfix it; the steps before step {step} are recorded",)
        error.add_note(f"continue with: {with_accepted(way) if isinstance(error, UserCodeError) else way}")

    def _remove_unbegun(self, error: BaseException) -> None:
        """Remove the folder of a run that failed in its first step, because the corrected command needs that folder.

        The folder is kept if the run can be continued, if its record shows where a number was not finite, or if another
        process has started a run there in the meantime.
        """
        folder = self.settings.run
        mine = self._made and self._locks[0].is_held
        begun = self.trainer.next_step > 0 or (folder / "checkpoints").exists()
        is_kept = isinstance(error, StoppedError | NonFiniteError) or not isinstance(error, Exception)
        if mine and not begun and not is_kept:
            for lock in self._locks:
                lock.end_heartbeats()
            shutil.rmtree(folder, ignore_errors=True)
            # As far as possible: the record may be what cannot be reached.
            with suppress(Exception):
                if self.settings.record is not None and self._locks[-1].is_held:
                    remove_run(self.settings.record)

    def _callbacks(self) -> list[Callback]:
        """Return what the settings ask for beside training; checkpoints come last, since they save why a run stops."""
        settings, trainer = self.settings, self.trainer
        places = [Described(), *([Reachable()] if settings.record is not None else [])]
        if not isinstance(trainer, RolloutTrainer) or not isinstance(settings, RolloutRun):
            return [*places, Checkpoints(settings.checkpoint, updates=0)]
        doctor = [Doctor(settings.doctor, trainer.reported)] if settings.doctor.looks else []
        return [*doctor, *places, Checkpoints(settings.checkpoint, settings.checkpoint.updates)]

    def _show(self, console: Console) -> None:
        """Print the results of a finished run other than its metrics, and the doctor's findings."""
        settings = self.settings
        settings.show(settings.run, console)
        if isinstance(settings, RolloutRun) and settings.doctor.looks:
            for line in verdict(settings.doctor, settings.run):
                console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _notes(self) -> list[str]:
        trainer = self.trainer
        notes = [*self._remarks, *notes_on_products(self._choices), *trainer.notes()]
        if trainer.next_step >= trainer.end:
            done = f"{self.settings.run} is complete: all its steps are done ({trainer.end})"
            notes.append(f"{done}; to train longer, resume it with a larger number of steps")
        return notes

    def _open_folder(self) -> Trackers:
        """Lock the folder, write the description of the run, and return its trackers.

        run.json comes first, since resuming needs only it.
        """
        folder, settings, trainer = self.settings.run, self.settings, self.trainer
        if not self._begun:
            self._lock()
            _check_free(folder)  # another process may have begun a run there just before
            if settings.record is not None:
                check_new_record(settings.record)
            self._made = True
            assert self._date is not None
            info = describe_run(settings, self._inputs, trainer, self._rewards)
            began_at = {"began": self._date.isoformat(timespec="seconds")}
            write_run(folder, info | began_at | described(self._chosen))
        else:
            record_changes(settings, self._changes, trainer, self._rewards)
            keep(folder, self._chosen)
        begin_record(settings, trainer.tokenizer)
        return Trackers(
            settings.trackers, folder, settings.project, settings.model_dump(mode="json"), trainer.next_step
        )


def train(settings: RolloutRun | ExampleRun, *, report: Report | None = None, **inputs: Any) -> Result:
    """Train a model: `Training(settings, **inputs).run(report)`."""
    return Training(settings, **inputs).run(report)


def resume(folder: Path, algorithm: str, accept_changes: bool = False) -> Result:
    """Resume a run from its folder; its algorithm is named as in the table of algorithms.

    Raises:
        UserError: there is no run in the folder, its algorithm differs, its rewards have changed, or it was started
            from Python with objects that were passed as arguments.
    """
    return train(settings_of(folder, algorithm, ()), resume=True, accept_changes=accept_changes)


def _check_new(settings: RolloutRun | ExampleRun, resume: bool, accept_changes: bool) -> None:
    """Check that a new run can begin in its folder, and its record in its place."""
    if accept_changes and not resume:
        raise UserError("accept_changes has no effect without resume")
    check_writable(settings.run)
    _check_free(settings.run)
    if settings.record is not None:
        check_new_record(settings.record)


def _check_free(folder: Path) -> None:
    way = continuation(folder)
    if way is not None:
        raise UserError(f"the run folder {folder} exists already; choose another, or continue it with: {way}")
    check_free(folder)
