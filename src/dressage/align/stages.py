"""What a stage of an align recipe is, and what its folder says about it."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from dressage.config import check
from dressage.data.prompts import load_prompts
from dressage.errors import UserError
from dressage.models.trained import load_start_tokenizer
from dressage.record import open_run
from dressage.rewards import build_rewards
from dressage.train.run import resume, train
from dressage.train.settings import ExampleRun, RolloutRun

_RESULTS = (
    ("held-out perplexity", "eval/perplexity"),
    ("held-out accuracy", "eval/reward/accuracy"),
    ("held-out accuracy", "eval/dpo/accuracy"),
    ("perplexity", "perplexity"),
    ("accuracy", "reward/accuracy"),
    ("accuracy", "dpo/accuracy"),
    ("reward", "reward/mean"),
)
"""What is said of a trained stage, the first that its record has."""


class State(Enum):
    """What is still to be done."""

    NEW = "to do"
    STARTED = "to be continued"
    DONE = "done"


@dataclass(frozen=True)
class Stage:
    """One command of the recipe."""

    name: str
    command: str
    settings: Any
    folder: Path
    needs: tuple[str, ...]
    """the earlier stages whose models it takes"""

    @property
    def state(self) -> State:
        """What its folder says."""
        raise NotImplementedError

    def check(self, before: Mapping[str, "Stage"]) -> None:
        """Find mistakes before anything runs; `before` are the stages of the recipe by name."""
        raise NotImplementedError

    def run(self) -> None:
        """Do what is still to be done."""
        raise NotImplementedError

    def result(self) -> tuple[float, str]:
        """Seconds of work that its folder knows of, and what came out of it in a few words."""
        raise NotImplementedError


@dataclass(frozen=True)
class Training(Stage):
    """A stage that trains a model."""

    settings: RolloutRun | ExampleRun

    @property
    def state(self) -> State:
        if not (self.folder / "run.json").exists():
            return State.NEW
        return State.DONE if (self.folder / "model").exists() else State.STARTED

    def check(self, before: Mapping[str, Stage]) -> None:
        """Read the data and make the rewards as the run will do it, as far as no earlier stage is needed for that."""
        if self.state is not State.NEW:
            self._check_same_settings()
        if self.state is State.DONE:
            return
        tokenizer = self.tokenizer(before)
        if isinstance(self.settings, ExampleRun):
            self.settings.examples(tokenizer)
            return
        load_prompts(self.settings.data, tokenizer)
        if not self.settings.rewards:
            raise UserError("there is no reward: add [[" + self.name + ".rewards]]")
        pending = {str(stage.folder / "model") for stage in before.values() if stage.state is not State.DONE}
        ready = [reward for reward in self.settings.rewards if not pending & set(map(str, reward.options.values()))]
        build_rewards(ready, torch.device("cpu"))

    def tokenizer(self, before: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
        """The tokenizer that the stage will find in the model it starts from, even where that is not trained yet."""
        for name in self.needs:
            start = before[name]
            is_start = self.settings.model.path == str(start.folder / "model")
            if is_start and isinstance(start, Training) and start.state is not State.DONE:
                return start.tokenizer(before)
        if isinstance(self.settings, ExampleRun):
            return self.settings.load_tokenizer()
        return load_start_tokenizer(self.settings.model)

    def run(self) -> None:
        if self.state is State.STARTED:
            resume(self.folder, self.command)
        else:
            train(self.settings)
        gc.collect()  # the models of a stage refer to themselves, and would be in the way of the next one's

    def result(self) -> tuple[float, str]:
        steps = open_run(self.folder).steps()
        seconds = sum(value or 0.0 for value in steps["time/total"].to_pylist())
        label, name = next(((label, name) for label, name in _RESULTS if name in steps.column_names), ("", ""))
        seen = [value for value in steps[name].to_pylist() if value is not None] if name else []
        return seconds, f"{label} {seen[0]:.3f} → {seen[-1]:.3f}" if seen else ""

    def _check_same_settings(self) -> None:
        values = {**open_run(self.folder).info["config"], "run": self.folder}
        started_with = check(type(self.settings), values, f"{self.folder}/run.json")
        before, now = dict(_flat(started_with)), dict(_flat(self.settings))
        name = next((name for name in {**now, **before} if before.get(name) != now.get(name)), None)
        if name is not None:
            raise UserError(
                f"{self.folder} was started with {name} = {before.get(name)}, and the recipe says {now.get(name)}; "
                "remove that folder and those of the stages that build on it, or undo the change"
            )


def _flat(settings: BaseModel, prefix: str = "") -> Any:
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
