"""Reading of align recipes: the stages, their settings, and their references to earlier stages."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from cavesson.align.stages import COMPARE, ComparisonSettings, ComparisonStage, Stage, TrainingStage
from cavesson.config import Settings, check, describe, load
from cavesson.errors import UserError
from cavesson.registry import ALGORITHMS
from cavesson.tools.settings import HELD_OUT, ResponseSettings

COMMANDS = (*ALGORITHMS, COMPARE)
REFERENCE = re.compile(r"\{(\w+)\}")
"""A value that is nothing but this stands for the model of an earlier stage."""


class AlignSettings(Settings):
    """Run several commands one after the other. Every other table of the recipe is a stage, in the order of the recipe.

    A stage has the settings of the command that it is named after, or of the one in its `command`.
    """

    model_config = ConfigDict(extra="allow")

    run: Path = Path("runs/align")
    """folder of all stages; every stage writes to the subfolder of its name"""
    common: dict[str, Any] = Field(default={})
    """settings for every stage that has them; the table of a stage overrides them"""


def read_recipe(recipe: Path | None, flags: Sequence[str]) -> list[Stage]:
    """Read the stages of a recipe, apply the flags, and validate all settings.

    Raises:
        UserError: the recipe does not exist, a setting of any stage is unknown or out of range, or a stage refers to
            one that does not come before it.
    """
    source = str(recipe) if recipe else "the flags"
    settings = load(AlignSettings, recipe, flags)
    _check_places(settings.common, settings.run / "STAGE", f"{source}: [common]")
    stages: dict[str, Stage] = {}
    for name, table in (settings.model_extra or {}).items():
        if not isinstance(table, dict):
            raise UserError(f"{source}: {name!r} belongs in [common] or in the table of a stage")
        stages[name] = _stage(name, table, settings, stages, source)
    if not stages:
        raise UserError(
            f"{source}: the recipe has no stage; add a table such as [sft]; commands are {', '.join(COMMANDS)}"
        )
    used = {leaf for stage in stages.values() for leaf in _leaves(_known(settings.common, type(stage.settings)))}
    unused = next((leaf for leaf in _leaves(settings.common) if leaf not in used), None)
    if unused is not None:
        raise UserError(f"{source}: [common]: no stage has a setting {unused!r}")
    return list(stages.values())


def _stage(name: str, table: dict[str, Any], align: AlignSettings, before: Mapping[str, Stage], source: str) -> Stage:
    if not re.fullmatch(r"\w+", name):
        raise UserError(f"{source}: [{name}]: the name of a stage has only letters, digits and _, such as reward_model")
    where = f"{source}: [{name}]"
    command = str(table.get("command", name.replace("_", "-")))
    kind = _settings_of(command, where)
    own = {key: value for key, value in table.items() if key != "command"}
    folder = align.run / name
    _check_places(own, folder, where)
    needs: list[str] = []
    values = _resolved(_laid_over(_known(_of_stage(align.common, name), kind), own), before, needs, where)
    if kind is ComparisonSettings:
        compared = check(ComparisonSettings, {**values, "out": folder}, where)
        return ComparisonStage(name, command, compared, folder, tuple(needs))
    return TrainingStage(name, command, check(kind, {**values, "run": folder}, where), folder, tuple(needs))


def _check_places(table: Mapping[str, Any], folder: Path, where: str) -> None:
    """Raise a UserError if a table sets where a stage writes."""
    taken = next((key for key in ("run", "out") if key in table), None)
    if taken is not None:
        raise UserError(f"{where}: {taken} is always {folder}; to move all stages, set run above all tables")


def _of_stage(common: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the common settings for a stage, which has its own record."""
    record = common.get("record")
    return dict(common) if record is None else {**common, "record": f"{str(record).rstrip('/')}/{name}"}


def _settings_of(command: str, where: str) -> type[Any]:
    if command == COMPARE:
        return ComparisonSettings
    if command not in ALGORITHMS:
        raise UserError(f"{where}: there is no command {command!r}; command is one of {', '.join(COMMANDS)}")
    return ALGORITHMS[command].settings  # type: ignore[no-any-return]


def _resolved(value: Any, before: Mapping[str, Stage], needs: list[str], where: str) -> Any:
    """Return the values with every reference replaced by a path, and add the referenced stages to `needs`."""
    if isinstance(value, dict):
        return {key: _resolved(v, before, needs, f"{where} {key}") for key, v in value.items()}
    if isinstance(value, list):
        return [_resolved(v, before, needs, where) for v in value]
    match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    name = match[1]
    trained = [known for known, stage in before.items() if isinstance(stage, TrainingStage)]
    if name not in trained:
        earlier = f"before it: {', '.join(trained)}" if trained else "it is the first"
        raise UserError(f"{where}: {value} is not an earlier stage that trains a model ({earlier})")
    if name not in needs:
        needs.append(name)
    return before[name].model


def _laid_over(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _laid_over(merged[key], value) if both else value
    return merged


def _known(common: Mapping[str, Any], kind: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return those of the common settings that this kind of stage has."""
    unused = {f"data.{name}" for name in HELD_OUT} if issubclass(kind, ResponseSettings) else set()
    names = {name for name, *_ in describe(kind)} - unused
    groups = {name[: dot.start()] for name in names for dot in re.finditer(r"\.", name)}
    kept: dict[str, Any] = {}
    for key, value in common.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name in groups:
            inside = _known(value, kind, f"{name}.")
            kept |= {key: inside} if inside or not value else {}
        elif name in names:
            kept[key] = value
    return kept


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
