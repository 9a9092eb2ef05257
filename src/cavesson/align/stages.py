"""The stages of an align recipe, and their state, which is read from their folders."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.config_paths import LocalPath
from cavesson.tools.settings import CompareSettings

S = TypeVar("S", bound=BaseModel)

COMPARE = "compare"
"""The command of stages that compare models; all other commands train."""


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


@dataclass(frozen=True)
class TrainingStage(Stage):
    """A stage that trains a model."""

    settings: RolloutRun | ExampleRun

    @property
    def state(self) -> StageState:
        if not (self.folder / "run.json").exists():
            return StageState.NEW
        return StageState.DONE if Path(self.model).exists() else StageState.STARTED


class ComparisonSettings(CompareSettings):
    """Compare models on the same prompts."""

    models: tuple[LocalPath, ...] = Field(min_length=1)
    """the models, such as ["tiny", "{sft}", "{ppo}"]"""


@dataclass(frozen=True)
class ComparisonStage(Stage):
    """A stage that compares models."""

    settings: ComparisonSettings

    @property
    def result(self) -> Path:
        """The file with the finished comparison."""
        return self.folder / "comparison.json"

    @property
    def state(self) -> StageState:
        return StageState.DONE if self.result.exists() else StageState.NEW


def with_full_paths(settings: S) -> S:
    """Validate the settings again, so that paths to models of earlier stages, which now exist, become absolute.

    What was not given stays so: a comparison takes it over from the run that trained the model.
    """
    return type(settings).model_validate(settings.model_dump(exclude_unset=True))


def start_of(model: str, known: Mapping[str, Stage]) -> TrainingStage | None:
    """Return the unfinished stage that will train this model, or None if there is none."""
    pending = (
        stage for stage in known.values() if isinstance(stage, TrainingStage) and stage.state is not StageState.DONE
    )
    return next((stage for stage in pending if stage.model == model), None)
