"""What a stage of an align recipe is, and what its folder says about it."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.config import check
from cavesson.data.prompts import PromptSet, load_prompts
from cavesson.errors import UserError
from cavesson.integrations.trackers import require
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer
from cavesson.record import open as open_run
from cavesson.record.show import headline
from cavesson.rewards import build_rewards, rehearse
from cavesson.rewards.settings import RewardSettings
from cavesson.train.build import check_place
from cavesson.train.run import resume, train

S = TypeVar("S", bound=BaseModel)


def is_main() -> bool:
    """Whether this is the first, or the only, of the processes that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class State(Enum):
    """What is still to be done."""

    NEW = "to do"
    STARTED = "to be continued"
    DONE = "done"


@dataclass(frozen=True)
class Stage:
    """One command of a recipe."""

    name: str
    command: str
    settings: Any
    folder: Path
    needs: tuple[str, ...]
    """the earlier stages whose models it takes"""

    @property
    def model(self) -> str:
        """What a reference to this stage stands for."""
        return str(self.folder / "model")

    @property
    def state(self) -> State:
        """What its folder says."""
        raise NotImplementedError

    def check(self, known: Mapping[str, "Stage"]) -> None:
        """Find mistakes before anything runs; `known` are the stages of the recipe by name."""
        raise NotImplementedError

    def run(self) -> None:
        """Do what is still to be done."""
        raise NotImplementedError

    def result(self) -> str:
        """What came out of it, in a few words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Training(Stage):
    """A stage that trains a model."""

    settings: RolloutRun | ExampleRun

    @property
    def state(self) -> State:
        if not (self.folder / "run.json").exists():
            return State.NEW
        return State.DONE if Path(self.model).exists() else State.STARTED

    def check(self, known: Mapping[str, Stage]) -> None:
        """Read the data and make the rewards as the run will, as far as that needs no model still to be trained."""
        if self.state is not State.NEW:
            config = {**open_run(self.folder).info["config"], "run": self.folder}
            check_same(self, check(type(self.settings), config, f"{self.folder}/run.json"))
        if self.state is State.DONE:
            return
        require(self.settings.trackers)
        for name, start in self.settings.starts().items():
            if start_of(start.path, known) is None:
                check_place(name, start)
        tokenizer = self.tokenizer(known)
        if isinstance(self.settings, ExampleRun):
            self.settings.examples(tokenizer)
            return
        check_rewards(self.settings.rewards, known, load_prompts(self.settings.data, tokenizer))
        if not self.settings.rewards:
            raise UserError("there is no reward: give it rewards")

    def tokenizer(self, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
        """The tokenizer of its model, which may be one that is still to be trained."""
        start = start_of(self.settings.model.path, known)
        if start is not None:
            return start.tokenizer(known)
        return self.settings.load_tokenizer()

    def run(self) -> None:
        if self.state is State.STARTED:
            resume(self.folder, self.command)
        else:
            train(with_full_paths(self.settings))
        gc.collect()  # what a run was made of refers to itself, and the next stage needs the memory

    def result(self) -> str:
        return headline(self.folder) or ""


def with_full_paths(settings: S) -> S:
    """The same settings, read again now that the models of earlier stages are there: their paths become full ones."""
    return type(settings).model_validate(settings.model_dump())


def start_of(model: str, known: Mapping[str, Stage]) -> Training | None:
    """The stage that is still to train this model."""
    pending = (stage for stage in known.values() if isinstance(stage, Training) and stage.state is not State.DONE)
    return next((stage for stage in pending if stage.model == model), None)


def tokenizer_of(model: str, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that may still have to be trained."""
    start = start_of(model, known)
    return start.tokenizer(known) if start is not None else load_start_tokenizer(StartSettings(path=model))


def check_rewards(rewards: Sequence[RewardSettings], known: Mapping[str, Stage], prompts: PromptSet) -> None:
    """Make the rewards and call them on the prompts, but for reward models that are still to be trained."""
    ready = [r for r in rewards if all(start_of(str(value), known) is None for value in r.options.values())]
    made = build_rewards(ready, torch.device("cpu"))
    rehearse(made, prompts.texts, prompts.columns)


def check_same(stage: Stage, before: BaseModel) -> None:
    """A stage that has begun has the settings it was begun with."""
    then, now = dict(_flat(before)), dict(_flat(stage.settings))
    name = next((name for name in {**now, **then} if then.get(name) != now.get(name)), None)
    if name is not None:
        raise UserError(
            f"{stage.folder} was begun with {name} = {then.get(name)}, and the recipe says {now.get(name)}; "
            "remove that folder and those of the stages that build on it, or undo the change"
        )


def _flat(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
