"""The stages of an align recipe, and their state, which is read from their folders."""

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
    """Return whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


class State(Enum):
    """The progress of a stage."""

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
        """The path that replaces a reference to this stage."""
        return str(self.folder / "model")

    @property
    def state(self) -> State:
        """The state of the stage, read from its folder."""
        raise NotImplementedError

    def check(self, known: Mapping[str, "Stage"]) -> None:
        """Check the stage before anything runs.

        Args:
            known: the stages of the recipe by name.

        Raises:
            UserError: the stage would fail.
        """
        raise NotImplementedError

    def run(self) -> None:
        """Run the stage, or continue it if it was started."""
        raise NotImplementedError

    def result(self) -> str:
        """Return a summary of the result in a few words."""
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
        """Read the data and build the rewards as the run will, except for what needs models still to be trained."""
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
        """Load the tokenizer of the stage's model, even if that model is still to be trained."""
        start = start_of(self.settings.model.path, known)
        if start is not None:
            return start.tokenizer(known)
        return self.settings.load_tokenizer()

    def run(self) -> None:
        if self.state is State.STARTED:
            resume(self.folder, self.command)
        else:
            train(with_full_paths(self.settings))
        gc.collect()  # a run's objects form reference cycles, and the next stage needs the memory

    def result(self) -> str:
        return headline(self.folder) or ""


def with_full_paths(settings: S) -> S:
    """Validate the settings again, so that paths to models of earlier stages, which now exist, become absolute."""
    return type(settings).model_validate(settings.model_dump())


def start_of(model: str, known: Mapping[str, Stage]) -> Training | None:
    """Return the unfinished stage that will train this model, or None if there is none."""
    pending = (stage for stage in known.values() if isinstance(stage, Training) and stage.state is not State.DONE)
    return next((stage for stage in pending if stage.model == model), None)


def tokenizer_of(model: str, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, even if the model is still to be trained."""
    start = start_of(model, known)
    return start.tokenizer(known) if start is not None else load_start_tokenizer(StartSettings(path=model))


def check_rewards(rewards: Sequence[RewardSettings], known: Mapping[str, Stage], prompts: PromptSet) -> None:
    """Build the rewards and call them on the prompts, except reward models that are still to be trained."""
    ready = [r for r in rewards if all(start_of(str(value), known) is None for value in r.options.values())]
    made = build_rewards(ready, torch.device("cpu"))
    rehearse(made, prompts.texts, prompts.columns)


def check_same(stage: Stage, before: BaseModel) -> None:
    """Check that the settings of a started stage are unchanged.

    Raises:
        UserError: a setting differs from the one the stage was started with.
    """
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
