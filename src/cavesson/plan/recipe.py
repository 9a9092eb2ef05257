"""The runs that a recipe describes: that of one command, or the stages of `cavesson align`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.align.recipe import read_recipe
from cavesson.align.stages import Stage, StageState, TrainingStage, start_of
from cavesson.config import Settings, check, load
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS
from cavesson.rollout.rewards.settings import RewardSettings


class Planned(NamedTuple):
    """A run to be checked."""

    name: str
    """of its stage, or its recipe"""
    command: str
    settings: RolloutRun | ExampleRun
    """with the model it starts from in the end, where an earlier stage is still to make it"""
    rewards: tuple[RewardSettings, ...]
    """those that can be made already"""
    begun: bool
    """whether its folder may be there"""


class _Anything(Settings):
    """A recipe of any command."""

    model_config = ConfigDict(extra="allow")


def planned(recipe: Path | None, flags: Sequence[str], command: str | None) -> list[Planned]:
    """Return the runs of a recipe with the flags applied.

    A recipe does not name its command. If it fits several commands, its tables or the name of its file decide; if they
    do not, `command` must be given.

    Raises:
        UserError: no command accepts the recipe, or several do.
    """
    values = load(_Anything, recipe, flags).model_extra or {}
    source = str(recipe) if recipe else "the flags"
    if command is None and _is_align(values):
        return _stages(recipe, flags)
    runs = _fitting(values, source, command)
    name = command or _named(runs, recipe, values)
    settings = runs[name]
    rewards = settings.rewards if isinstance(settings, RolloutRun) else ()
    return [Planned(source, name, settings, rewards, False)]


def _is_align(values: Mapping[str, Any]) -> bool:
    """Return whether a recipe has stages, which are tables with their own data."""
    tables = [table for name, table in values.items() if isinstance(table, dict) and name not in ("data", "model")]
    return any("data" in table and not isinstance(table["data"], str) for table in tables)


def _fitting(values: Mapping[str, Any], source: str, command: str | None) -> dict[str, Any]:
    if command is not None and command not in ALGORITHMS:
        raise UserError(f"--command {command}: there is no such command; it is one of {', '.join(ALGORITHMS)}")
    runs, mistakes = {}, {}
    for name in [command] if command else ALGORITHMS:
        try:
            runs[name] = check(ALGORITHMS[name].settings, values, source)
        except UserError as mistake:
            mistakes[name] = mistake
    if not runs:  # report the error of the command that knows most of the settings
        raise mistakes[max(mistakes, key=lambda name: len(values.keys() & ALGORITHMS[name].settings.model_fields))]
    return runs


def _named(runs: Mapping[str, Any], recipe: Path | None, values: Mapping[str, Any]) -> str:
    """Return the command that the recipe is for, judging by its tables or its name."""
    if len(runs) == 1:
        return next(iter(runs))
    own = [name for name in runs if name.replace("-", "_") in values]
    stem = "" if recipe is None else recipe.stem
    named = own or sorted((name for name in runs if name in stem), key=len)[-1:]
    sampling = [name for name in runs if issubclass(ALGORITHMS[name].settings, RolloutRun)]
    if len(named) != 1 and "rewards" not in values and sampling != list(runs):
        rest = [name for name in runs if name not in sampling]
        named = rest if len(rest) == 1 else named
    if len(named) != 1:
        raise UserError(f"the recipe fits {', '.join(runs)}: choose one with --command")
    return named[0]


def _stages(recipe: Path | None, flags: Sequence[str]) -> list[Planned]:
    stages = {stage.name: stage for stage in read_recipe(recipe, flags)}
    return [
        _stage(stage, stages)
        for stage in stages.values()
        if isinstance(stage, TrainingStage) and stage.state is not StageState.DONE
    ]


def _stage(stage: TrainingStage, stages: Mapping[str, Stage]) -> Planned:
    settings: Any = stage.settings
    earlier = start_of(settings.model.path, stages)
    if earlier is not None:
        start = _stage(earlier, stages).settings.model
        model = {"path": start.path, "gguf_file": start.gguf_file, "new": start.new}
        settings = settings.model_copy(update={"model": settings.model.model_copy(update=model)})
    rewards = settings.rewards if isinstance(settings, RolloutRun) else ()
    ready = tuple(r for r in rewards if all(start_of(str(v), stages) is None for v in r.options.values()))
    return Planned(stage.name, stage.command, settings, ready, stage.state is StageState.STARTED)
