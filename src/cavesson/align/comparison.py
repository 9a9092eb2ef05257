"""The stage that compares models, usually the last one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field
from rich.console import Console

from cavesson.align.stages import Stage, State, check_rewards, check_same, is_main, tokenizer_of, with_full_paths
from cavesson.config import check
from cavesson.config_paths import LocalPath
from cavesson.data.prompts import load_prompts
from cavesson.tools.compare import CompareSettings, compare, show

COMMAND = "compare"
_RESULT = "comparison.json"


class ComparisonSettings(CompareSettings):
    """Compare models on the same prompts."""

    models: tuple[LocalPath, ...] = Field(min_length=1)
    """the models, such as ["tiny", "{sft}", "{ppo}"]"""


@dataclass(frozen=True)
class Comparison(Stage):
    """A stage that compares models."""

    settings: ComparisonSettings

    @property
    def state(self) -> State:
        return State.DONE if (self.folder / _RESULT).exists() else State.NEW

    def check(self, known: Mapping[str, Stage]) -> None:
        """Read the prompts with every model's tokenizer, and build the rewards."""
        if self.state is State.DONE:
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
