"""A run from its first step, or from where it was left, to a finished model."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import dressage
from dressage.algorithms import ALGORITHMS, name_of
from dressage.config import check
from dressage.errors import UserError
from dressage.integrations.trackers import Trackers
from dressage.models.policy import causal
from dressage.record import Recorder, begin_attempt, write_run, write_vocabulary
from dressage.rewards import Reward
from dressage.rewards.base import RewardFunction
from dressage.train.build import Inputs, build
from dressage.train.checkpoint import latest
from dressage.train.loop import Report, Trainer
from dressage.train.memory import keep_freed_memory
from dressage.train.online import RolloutTrainer
from dressage.train.processes import Processes
from dressage.train.progress import Progress
from dressage.train.rollouts import Collector
from dressage.train.settings import ExampleRun, RolloutRun, RunSettings


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    metrics: list[dict[str, float]]
    """of every step this call did, in order"""
    final: dict[str, float]
    """what was measured of the trained model; empty for algorithms that learn from their own responses"""
    policy: Any
    """what was trained, in its roles; `policy.model` is the Hugging Face model, wrapped by PEFT if it has adapters;
    those of a reward model are merged into its weights when it is saved"""
    tokenizer: PreTrainedTokenizerBase


class Training:
    """A run that is built and can be started; between the two its parts can be looked at.

    Args:
        settings: of the run; everything below may also be named in them.
        model: a causal language model object, changed in place, with its `tokenizer`.
        tokenizer: of the model.
        prompts: texts, or columns by name of which one is called `prompt` and the others go to the rewards.
        rewards: a function `(prompts, responses, **columns)`, or several `Reward`s.
        resume: continue the run in `settings.run` from its newest checkpoint, or from its beginning if it has none.

    Raises:
        UserError: something in the settings or the data is wrong.
    """

    def __init__(
        self,
        settings: RolloutRun | ExampleRun,
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prompts: Sequence[str] | Mapping[str, Sequence[Any]] | None = None,
        rewards: RewardFunction | Sequence[Reward] | None = None,
        resume: bool = False,
    ) -> None:
        folder = settings.run
        if not resume and folder.exists():
            raise UserError(
                f"the run folder {folder} exists already; continue it with --resume {folder}, or choose another"
            )
        self.settings, self.resume = settings, resume
        self._inputs = Inputs(model, tokenizer, prompts, rewards)
        self.processes = Processes(settings.model.device)
        keep_freed_memory()
        self.trainer = build(settings, self._inputs, self.processes)
        if resume:
            _check_same_model(folder, self.trainer)
        checkpoint = latest(folder) if resume else None
        if checkpoint is not None:
            self.trainer.restore(checkpoint)

    @property
    def collector(self) -> Collector:
        """What samples and rewards responses, of an algorithm that does."""
        assert isinstance(self.trainer, RolloutTrainer)
        return self.trainer.collector

    def run(self, report: Report | None = None) -> Result:
        """Train to the last step and save the model.

        Args:
            report: called after every step; None shows a live table.

        Raises:
            UserError: the numbers stopped being finite, a reward went wrong, or the disk is full.
        """
        folder, trainer, main = self.settings.run, self.trainer, self.processes.is_main
        self.processes.wait()
        if main:
            self._open_folder()
        self.processes.wait()
        metrics: list[dict[str, float]] = []
        notes = self._notes()
        with (
            Progress(trainer.steps, trainer.next_step, notes, quiet=bool(report) or not main) as progress,
            trainer.recorder or nullcontext(),
            trainer.trackers or nullcontext(),
        ):
            final = trainer.run(folder, lambda step, seen: _collect(metrics, report or progress.report, step, seen))
            if report is None:
                progress.finish(final, [note for note in trainer.notes() if note not in notes])
        if report is None and main:
            self.settings.show(folder, Console())
        self.processes.wait()
        return Result(folder, metrics, final, trainer.learner.model, trainer.tokenizer)

    def _notes(self) -> list[str]:
        trainer = self.trainer
        notes = trainer.notes()
        if trainer.next_step >= trainer.steps:
            notes.append(f"{self.settings.run} is complete: all its {trainer.steps} steps are done")
        return notes

    def _open_folder(self) -> None:
        folder = self.settings.run
        if not self.resume:
            write_run(folder, _describe(self.settings, self._inputs, self.trainer))
        if not (folder / "vocabulary.parquet").exists():
            _write_vocabulary(folder, self.trainer.tokenizer)
        self.trainer.recorder = Recorder(folder, attempt=begin_attempt(folder, self.trainer.next_step))
        settings = self.settings
        self.trainer.trackers = Trackers(
            settings.trackers, folder, settings.project, settings.model_dump(mode="json"), self.trainer.next_step
        )


def train(settings: RolloutRun | ExampleRun, *, report: Report | None = None, **inputs: Any) -> Result:
    """Train a model: `Training(settings, **inputs).run(report)`."""
    return Training(settings, **inputs).run(report)


def resume(folder: Path, algorithm: str) -> Result:
    """Continue a run from its own folder.

    Args:
        folder: of the run.
        algorithm: its name in the table of algorithms.

    Raises:
        UserError: there is no run in the folder, another algorithm trained it, or it was started from Python with
            objects that only Python has.
    """
    info = dressage.open(folder).info
    if info.get("inputs"):
        raise UserError(
            f"{folder} was started from Python with its own {', '.join(info['inputs'])}; "
            "continue it there with Training(..., resume=True)"
        )
    if "config" not in info:
        raise UserError(f"{folder} was not trained here, it was imported: there is nothing to resume")
    if info["algorithm"] != algorithm:
        raise UserError(f"{folder} is a run of {info['algorithm']}: dressage {info['algorithm']} --resume {folder}")
    settings = check(ALGORITHMS[algorithm].settings, {**info["config"], "run": folder}, f"{folder}/run.json")
    return train(settings, resume=True)


def _collect(metrics: list[dict[str, float]], report: Report, step: int, seen: dict[str, float]) -> None:
    metrics.append(seen)
    report(step, seen)


def _describe(settings: RunSettings, inputs: Inputs, trainer: Trainer) -> dict[str, Any]:
    """What run.json holds."""
    tokenizer = trainer.tokenizer
    return {
        "dressage": version("dressage"),
        "algorithm": name_of(settings),
        "config": settings.model_dump(mode="json"),
        "inputs": inputs.given,
        "model": {"name": settings.model.path, "fingerprint": fingerprint(causal(trainer.model))},
        "tokenizer": {
            "fingerprint": _hash(sorted(tokenizer.get_vocab().items())),
            "pad": tokenizer.pad_token_id,
            "bos": tokenizer.bos_token_id,
        },
        **trainer.describe(),
        "steps": trainer.steps,
        "processes": trainer.learner.processes.count,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"python": platform.python_version()},
    }


def _check_same_model(folder: Path, trainer: Trainer) -> None:
    started_with = dressage.open(folder).info["model"]["fingerprint"]
    if fingerprint(causal(trainer.model)) != started_with:
        raise UserError(f"{folder} was started with another model; resume it with the model as it was before training")


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of names, shapes and the first thousand numbers of every weight: enough to tell models apart."""
    parts = [(n, tuple(p.shape), p.detach().flatten()[:1000].float().tolist()) for n, p in model.named_parameters()]
    return _hash(parts)


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def _write_vocabulary(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = list(range(len(tokenizer)))
    write_vocabulary(folder, tokenizer.convert_ids_to_tokens(ids), tokenizer.batch_decode([[i] for i in ids]))
