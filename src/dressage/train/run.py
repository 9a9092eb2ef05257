"""From settings to a finished run: build everything, train, leave a model behind."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dressage.algorithms.ppo import PPORun
from dressage.config import check
from dressage.data.prompts import PromptSet, load_prompts, tokenize
from dressage.errors import UserError
from dressage.models.load import load_causal, load_tokenizer, prepare, with_pad_token
from dressage.models.policy import Policy, build_policy, causal
from dressage.models.trained import save_trained
from dressage.record import Recorder, begin_attempt, open_run, write_run, write_vocabulary
from dressage.rewards import Reward, build_rewards
from dressage.rewards.base import RewardFunction
from dressage.rewards.shaping import Shaping
from dressage.sampling.randomness import Purpose, generator
from dressage.sampling.sampler import Sampler
from dressage.train.checkpoint import latest
from dressage.train.loop import Report, Trainer
from dressage.train.memory import keep_freed_memory
from dressage.train.optimizer import Optimizer
from dressage.train.processes import Processes
from dressage.train.progress import Progress
from dressage.train.rollouts import Collector


@dataclass(frozen=True)
class Inputs:
    """What a caller from Python may give as objects instead of naming it in the settings."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: Sequence[str] | Mapping[str, Sequence[Any]] | None = None
    rewards: RewardFunction | Sequence[Reward] | None = None


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    metrics: list[dict[str, float]]
    """of every step this call did, in order"""
    policy: Policy
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
        settings: PPORun,
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
        if settings.batch_size < self.processes.count:
            raise UserError(f"batch_size {settings.batch_size} is less than one response for each process")
        self.trainer, self._prompts = _build(settings, self._inputs, self.processes)
        if resume:
            _check_same_model(folder, self.trainer)
        checkpoint = latest(folder) if resume else None
        if checkpoint is not None:
            self.trainer.restore(checkpoint)

    @property
    def collector(self) -> Collector:
        """What samples and rewards responses."""
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
        metrics: list[dict[str, float]] = []
        with (
            Progress(self.settings.steps, trainer.next_step, self._notes(), quiet=bool(report) or not main) as progress,
            trainer.recorder or nullcontext(),
        ):
            trainer.run(folder, lambda step, seen: _collect(metrics, report or progress.report, step, seen))
        if main:
            save_trained(folder / "model", trainer.policy.model, self.collector.tokenizer, self.settings.model)
        self.processes.wait()
        return Result(folder, metrics, trainer.policy, self.collector.tokenizer)

    def _notes(self) -> list[str]:
        notes = []
        if self.trainer.next_step >= self.settings.steps:
            notes.append(f"{self.settings.run} is complete: all its {self.settings.steps} steps are done")
        dropped = self._prompts.dropped
        if dropped:
            rows = ", ".join(map(str, dropped[:10])) + (", …" if len(dropped) > 10 else "")
            count = len(dropped) + len(self._prompts)
            notes.append(f"{len(dropped)} of {count} prompts are over data.max_prompt_tokens and dropped: rows {rows}")
        filters = self.settings.sampling.filters
        if filters:
            notes.append(f"sampling is filtered ({', '.join(filters)}): KL is measured wrongly and may become negative")
        return notes

    def _open_folder(self) -> None:
        folder = self.settings.run
        if not self.resume:
            write_run(folder, _describe(self.settings, self._inputs, self.trainer, self._prompts))
        if not (folder / "vocabulary.parquet").exists():
            _write_vocabulary(folder, self.collector.tokenizer)
        self.trainer.recorder = Recorder(folder, attempt=begin_attempt(folder, self.trainer.next_step))


def train(settings: PPORun, *, report: Report | None = None, **inputs: Any) -> Result:
    """Train a model: `Training(settings, **inputs).run(report)`."""
    return Training(settings, **inputs).run(report)


def resume(folder: Path, kind: type[PPORun] = PPORun) -> Result:
    """Continue a run from its own folder.

    Raises:
        UserError: there is no run in the folder, or it was started from Python with objects that only Python has.
    """
    info = open_run(folder).info
    if info.get("inputs"):
        raise UserError(
            f"{folder} was started from Python with its own {', '.join(info['inputs'])}; "
            "continue it there with Training(..., resume=True)"
        )
    if "config" not in info:
        raise UserError(f"{folder} was not trained here, it was imported: there is nothing to resume")
    settings = check(kind, {**info["config"], "run": folder}, f"{folder}/run.json")
    return train(settings, resume=True)


def _collect(metrics: list[dict[str, float]], report: Report, step: int, seen: dict[str, float]) -> None:
    metrics.append(seen)
    report(step, seen)


def _build(settings: PPORun, inputs: Inputs, processes: Processes) -> tuple[Trainer, PromptSet]:
    # The user's mistakes are found before the first weight is loaded, as far as that is possible.
    rewards = _rewards(settings, inputs, processes.device)
    if inputs.model is not None and inputs.tokenizer is None:
        raise UserError("a model object comes without its tokenizer; pass tokenizer= as well")
    tokenizer = inputs.tokenizer or load_tokenizer(settings.model.path, settings.model.gguf_file)
    tokenizer = with_pad_token(tokenizer, settings.model.path)
    prompts = _prompts(settings, inputs, tokenizer)
    torch.manual_seed(
        int(generator(settings.seed, Purpose.INITIAL_WEIGHTS).integers(2**32))
    )  # adapters start at random
    model = inputs.model or load_causal(settings.model.path, settings.model.gguf_file, settings.model.dtype)
    policy = build_policy(
        prepare(model), settings.model, settings.value, settings.reference, settings.sampling.temperature
    ).to(processes.device)
    processes.share_weights(policy)
    sampler = Sampler(policy, tokenizer, settings.sampling, settings.seed)
    trainer = Trainer(
        settings=settings,
        kl=settings.kl,
        algorithm=settings.algorithm,
        policy=policy,
        optimizer=Optimizer(policy, settings.optimizer),
        collector=Collector(prompts, sampler, rewards, tokenizer),
        shaping=Shaping(settings.shaping),
        processes=processes,
        recorder=None,
        kl_coef=settings.kl.coef,
    )
    return trainer, prompts


def _rewards(settings: PPORun, inputs: Inputs, device: torch.device) -> tuple[Reward, ...]:
    if inputs.rewards is None:
        rewards = build_rewards(settings.rewards, device)
    elif callable(inputs.rewards):
        rewards = (Reward(getattr(inputs.rewards, "__name__", "reward"), inputs.rewards),)
    else:
        rewards = tuple(inputs.rewards)
    if not rewards:
        raise UserError("there is no reward: add [[rewards]] to the recipe, or pass rewards=")
    return rewards


def _prompts(settings: PPORun, inputs: Inputs, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    if inputs.prompts is None:
        return load_prompts(settings.data, tokenizer)
    limit = settings.data.max_prompt_tokens
    if not isinstance(inputs.prompts, Mapping):
        return tokenize(inputs.prompts, tokenizer, limit)
    columns = dict(inputs.prompts)
    column = settings.data.column
    if column not in columns:
        raise UserError(f"the prompts have no column {column!r}; they have {', '.join(columns) or 'none'}")
    return tokenize(columns.pop(column), tokenizer, limit, columns=columns)


def _describe(settings: PPORun, inputs: Inputs, trainer: Trainer, prompts: PromptSet) -> dict[str, Any]:
    """What run.json holds."""
    tokenizer = trainer.collector.tokenizer
    return {
        "dressage": version("dressage"),
        "algorithm": type(settings.algorithm).__name__.lower(),
        "config": settings.model_dump(mode="json"),
        "inputs": [name for name, value in vars(inputs).items() if value is not None],
        "model": {"name": settings.model.path, "fingerprint": fingerprint(causal(trainer.policy.model))},
        "tokenizer": {"fingerprint": _hash(sorted(tokenizer.get_vocab().items())), "pad": tokenizer.pad_token_id},
        "eos_token_ids": trainer.collector.sampler.eos.tolist(),
        "prompts": {"count": len(prompts), "dropped": list(prompts.dropped)},
        "processes": trainer.processes.count,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"python": platform.python_version()},
    }


def _check_same_model(folder: Path, trainer: Trainer) -> None:
    started_with = open_run(folder).info["model"]["fingerprint"]
    if fingerprint(causal(trainer.policy.model)) != started_with:
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
