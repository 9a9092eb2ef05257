"""Settings that are "auto": their values are chosen once, most by the plan of the memory, and the run keeps them."""

from pathlib import Path
from typing import Any

from cavesson.algorithms.runs import ExampleRun, RolloutRun
from cavesson.errors import UserError
from cavesson.processes import Processes
from cavesson.record import run_info
from cavesson.record.run_folder import rewrite_run
from cavesson.registry import chosen_by_plan
from cavesson.train.build import Inputs

_KEY = "chosen"
"""Where run.json has the values by the names of the settings."""


def left_to_plan(settings: RolloutRun | ExampleRun) -> list[str]:
    """Return the dotted names of the settings that are "auto" and that the plan chooses."""
    values = {
        "model.gradient_checkpointing": settings.model.gradient_checkpointing,
        "update.micro_batch_tokens": settings.update.micro_batch_tokens,
    }
    return [name for name, value in values.items() if value == "auto"]


def _left_to_engine(settings: RolloutRun | ExampleRun) -> list[str]:
    """Return those that the engine chooses, see `Engine.auto_values`."""
    auto = isinstance(settings, RolloutRun) and settings.sampling.merge_adapters == "auto"
    return ["sampling.merge_adapters"] if auto else []


def choices(
    settings: RolloutRun | ExampleRun, inputs: Inputs, processes: Processes, begun: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the settings that are "auto", and notes for the user; a run that has begun keeps its own.

    A value decides which passes are made together, or with which weights, and so how numbers are rounded. What the
    engine chooses is only known here if the run has kept it.

    Raises:
        UserError: the plan does not know such a run.
    """
    names = left_to_plan(settings)
    known: dict[str, Any] = run_info(settings.run).get(_KEY, {}) if begun else {}
    kept = {name: known[name] for name in (*names, *_left_to_engine(settings)) if name in known}
    if all(name in kept for name in names):
        return kept, []
    if processes.count > 1:
        raise UserError(f'{names[0]} "auto" plans for a single process; set it to a value that fits')
    if inputs.given:
        raise UserError(
            f'{names[0]} "auto" needs all that the run uses to be named in its settings, and {inputs.given[0]}= was '
            "given in Python; set it to a value that fits"
        )
    values, notes = chosen_by_plan(with_choices(settings, kept), processes.device)
    return kept | values, notes


def with_choices(settings: Any, values: dict[str, Any]) -> Any:
    """Return settings with chosen values, by their dotted names."""
    for name, value in values.items():
        group, field = name.split(".")
        changed = getattr(settings, group).model_copy(update={field: value})
        settings = settings.model_copy(update={group: changed})
    return settings


def described(values: dict[str, Any]) -> dict[str, Any]:
    """Return what run.json has of chosen values, if there are any."""
    return {_KEY: values} if values else {}


def keep(folder: Path, values: dict[str, Any]) -> None:
    """Write the values of a run that resumes to its run.json, if it has others."""
    info = run_info(folder)
    if info.get(_KEY, {}) != values:
        rewrite_run(folder, {name: value for name, value in info.items() if name != _KEY} | described(values))
