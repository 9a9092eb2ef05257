"""Display of a row of a recipe's data token by token, as the recipe's command would read it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field
from rich.console import Console

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.config import Settings, check, load
from cavesson.data.settings import AnyDataSettings, ViewSettings
from cavesson.data.show import show_row
from cavesson.data.types import Prompt
from cavesson.data.view import KINDS, recognised
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS


class RecipeRowSettings(Settings):
    """Show a row of a recipe's data. All other settings are those of the recipe."""

    model_config = ConfigDict(extra="allow")

    row: int = Field(1, ge=1)
    """number of the row"""
    kind: Literal["prompts", "demonstrations", "pairs", "labelled"] | None = None
    """kind of the rows, if several commands accept the recipe; none = that of the first row"""


def show_recipe(recipe: Path, flags: Sequence[str], console: Console) -> None:
    """Print how the recipe of any algorithm reads its data, and one row of it token by token.

    The flags are `--row`, `--kind`, and settings that override those of the recipe.

    Raises:
        UserError: no command accepts the recipe, its data or tokenizer cannot be read, or there is no such row.
    """
    settings = load(RecipeRowSettings, recipe, flags)
    runs = _runs(settings.model_extra or {}, str(recipe))
    data = AnyDataSettings.model_validate(next(iter(runs.values())).data.model_dump(exclude_unset=True))
    kinds = list(dict.fromkeys(map(_kind, runs.values())))
    kind = settings.kind or (kinds[0] if len(kinds) == 1 else _word(recognised(ViewSettings(data=data)).kind))
    readers = {command: run for command, run in runs.items() if _kind(run) == kind}
    if not readers:
        raise UserError(f"{recipe}: {' and '.join(runs)} would read {' or '.join(kinds)}, and not {kind}")
    found = recognised(ViewSettings.model_validate({"kind": kind, "data": data}))
    tokenizer = next(iter(readers.values())).load_tokenizer()
    show_row(data, found, settings.row, tokenizer, console, {"recipe of": ", ".join(readers)})


def _runs(values: Mapping[str, Any], source: str) -> dict[str, ExampleRun | RolloutRun]:
    """Return the settings of a run for every command that accepts these values."""
    runs, mistakes = {}, {}
    for command, entry in ALGORITHMS.items():
        try:
            runs[command] = check(entry.settings, values, source)
        except UserError as mistake:
            mistakes[command] = mistake
    if not runs:  # report the error of the command that knows most of the settings
        raise mistakes[max(ALGORITHMS, key=lambda name: len(values.keys() & ALGORITHMS[name].settings.model_fields))]
    return runs


def _kind(run: ExampleRun | RolloutRun) -> str:
    return _word(run.row_kind if isinstance(run, ExampleRun) else Prompt)


def _word(kind: type[Any]) -> str:
    return next(word for word, one in KINDS.items() if one is kind)
