"""The stages of an align recipe, and their state, which is read from their folders."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, Field
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.config import check
from cavesson.config_paths import LocalPath
from cavesson.data.prompts import PromptSet, load_prompts
from cavesson.errors import UserError
from cavesson.integrations.trackers import require
from cavesson.models.settings import StartSettings
from cavesson.models.trained import load_start_tokenizer
from cavesson.processes import is_main
from cavesson.record import run_info
from cavesson.record.show import headline
from cavesson.rewards import build_rewards, rehearse
from cavesson.rewards.settings import RewardSettings
from cavesson.tools.compare import CompareSettings, compare, show
from cavesson.train.build import check_place
from cavesson.train.resuming import flattened
from cavesson.train.run import resume, train

S = TypeVar("S", bound=BaseModel)

COMPARE = "compare"
"""The command of stages that compare models; all other commands train."""
_RESULT = "comparison.json"


class StageState(Enum):
    """The progress of a stage."""

    NEW = "to do"
    STARTED = "to resume"
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
    def state(self) -> StageState:
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
class TrainingStage(Stage):
    """A stage that trains a model."""

    settings: RolloutRun | ExampleRun

    @property
    def state(self) -> StageState:
        if not (self.folder / "run.json").exists():
            return StageState.NEW
        return StageState.DONE if Path(self.model).exists() else StageState.STARTED

    def check(self, known: Mapping[str, Stage]) -> None:
        """Read the data and build the rewards as the run will, except for what needs models still to be trained."""
        if self.state is not StageState.NEW:
            config = {**run_info(self.folder)["config"], "run": self.folder}
            check_same(self, check(type(self.settings), config, f"{self.folder}/run.json"))
        if self.state is StageState.DONE:
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
            raise UserError("there is no reward: set rewards")

    def tokenizer(self, known: Mapping[str, Stage]) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the stage's model, even if that model is still to be trained."""
        start = start_of(self.settings.model.path, known)
        if start is not None:
            return start.tokenizer(known)
        return self.settings.load_tokenizer()

    def run(self) -> None:
        if self.state is StageState.STARTED:
            resume(self.folder, self.command)
        else:
            train(with_full_paths(self.settings))
        gc.collect()  # a run's objects form reference cycles, and the next stage needs the memory

    def result(self) -> str:
        return headline(self.folder) or ""


def with_full_paths(settings: S) -> S:
    """Validate the settings again, so that paths to models of earlier stages, which now exist, become absolute."""
    return type(settings).model_validate(settings.model_dump())


def start_of(model: str, known: Mapping[str, Stage]) -> TrainingStage | None:
    """Return the unfinished stage that will train this model, or None if there is none."""
    pending = (
        stage for stage in known.values() if isinstance(stage, TrainingStage) and stage.state is not StageState.DONE
    )
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
    then, now = dict(flattened(before)), dict(flattened(stage.settings))
    name = next((name for name in {**now, **then} if then.get(name) != now.get(name)), None)
    if name is not None:
        raise UserError(
            f"{stage.folder} was started with {name} = {then.get(name)}, and the recipe has {now.get(name)}; "
            "remove that folder and those of the stages that build on it, or undo the change"
        )


class ComparisonSettings(CompareSettings):
    """Compare models on the same prompts."""

    models: tuple[LocalPath, ...] = Field(min_length=1)
    """the models, such as ["tiny", "{sft}", "{ppo}"]"""


@dataclass(frozen=True)
class ComparisonStage(Stage):
    """A stage that compares models."""

    settings: ComparisonSettings

    @property
    def state(self) -> StageState:
        return StageState.DONE if (self.folder / _RESULT).exists() else StageState.NEW

    def check(self, known: Mapping[str, Stage]) -> None:
        """Read the prompts with every model's tokenizer, and build the rewards."""
        if self.state is StageState.DONE:
            check_same(self, self._before())
            return
        data = self.settings.data
        if self.settings.prompts is not None:
            data = data.model_copy(update={"path": self.settings.prompts})
        sets = [load_prompts(data, tokenizer_of(model, known)) for model in self.settings.models]
        check_rewards(self.settings.rewards, known, sets[0])

    def run(self) -> None:
        if is_main():
            settings = with_full_paths(self.settings)
            show(compare([_short(model) for model in settings.models], settings), Console(), settings.show)

    def result(self) -> str:
        columns = json.loads((self.folder / _RESULT).read_bytes())["columns"]
        means = [next(iter(column["rewards"].values()), None) for column in columns]
        rewards = ", ".join(f"{mean['mean']:.3f}" for mean in means if mean)
        return f"{f'rewards {rewards}; ' if rewards else ''}see {self.folder}/comparison.html"

    def _before(self) -> ComparisonSettings:
        """Return the settings of the existing comparison."""
        written = json.loads((self.folder / _RESULT).read_bytes())
        settings = {**written["settings"], "models": [column["name"] for column in written["columns"]]}
        if settings["prompts"] is not None:
            settings["data"] = {**settings["data"], "path": None}
        return check(ComparisonSettings, settings, f"{self.folder}/{_RESULT}")


def _short(model: str) -> str:
    """Return the name of a model in the comparison: its path, relative to the working directory if it is inside."""
    path = Path(model)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else model
