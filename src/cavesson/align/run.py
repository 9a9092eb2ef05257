"""Running the unfinished stages of a recipe."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.table import Table

from cavesson.align.recipe import read_recipe
from cavesson.align.stages import Stage, StageState, TrainingStage
from cavesson.command_line import command_line
from cavesson.errors import UserError
from cavesson.processes import is_main
from cavesson.record.writable import check_writable


def align(
    recipe: Path | None, flags: Sequence[str] = (), train: Callable[[TrainingStage], None] | None = None
) -> list[Stage]:
    """Run a whole recipe: skip stages that are done, and continue those that were started.

    All stages are checked before the first one runs. The state of an earlier call is read only from their folders.
    Stages run one after the other in this process, so each reuses the memory of the previous one.

    Args:
        recipe: a TOML file with a table for every stage.
        flags: settings that override those of the recipe, such as `--ppo.kl.coef 0.1`.
        train: runs a stage that trains in other processes; None = in this one.

    Raises:
        UserError: the recipe or the data of any stage is invalid, or a stage failed.
    """
    console = Console(quiet=not is_main())
    stages = read_recipe(recipe, flags)
    states = {stage.name: stage.state for stage in stages}
    console.print(_plan(stages, states))
    _check(stages)
    seconds: dict[str, float] = {}
    for stage in stages:
        if states[stage.name] is StageState.DONE:
            continue
        console.print(f"\n{stage.name}: cavesson {stage.command}, in {stage.folder}", highlight=False, soft_wrap=True)
        start = perf_counter()
        if train is not None and isinstance(stage, TrainingStage):
            train(stage)
        else:
            with _named(stage):
                stage.run()
        seconds[stage.name] = perf_counter() - start
    if is_main():  # the other processes may get here before the comparison is written
        console.print(_summary(stages, states, seconds))
        if trained := [stage.folder for stage in stages if isinstance(stage, TrainingStage)]:
            console.print(f"next     {command_line('board', *trained)}", highlight=False, markup=False, soft_wrap=True)
    return stages


def run_stage(recipe: Path, flags: Sequence[str], name: str) -> None:
    """Run one stage of a recipe, in a process that the command has started for it after it has checked all stages.

    Raises:
        UserError: the stage failed.
    """
    stage = next(stage for stage in read_recipe(recipe, flags) if stage.name == name)
    with _named(stage):
        stage.run()


@contextmanager
def _named(stage: Stage) -> Iterator[None]:
    """Add the name of the stage to the message of a UserError."""
    try:
        yield
    except UserError as error:
        error.args = (f"stage {stage.name}: {error}",)  # keeps its class and exit code
        raise


def _check(stages: Sequence[Stage]) -> None:
    known = {stage.name: stage for stage in stages}
    for stage in stages:
        with _named(stage):
            _check_order(stage, known)
            check_writable(stage.folder)
            stage.check(known)


def _check_order(stage: Stage, known: dict[str, Stage]) -> None:
    """Raise a UserError if a stage was started with the model of an earlier stage that must be trained again."""
    missing = [name for name in stage.needs if known[name].state is not StageState.DONE]
    if missing and stage.state is not StageState.NEW:
        raise UserError(
            f"{stage.folder} was made with the model of {missing[0]}, which will be trained again; "
            "remove that folder as well"
        )


def _plan(stages: Sequence[Stage], states: dict[str, StageState]) -> Table:
    table = Table("stage", "command", "builds on", "state", title="Plan")
    for stage in stages:
        table.add_row(stage.name, stage.command, ", ".join(stage.needs), states[stage.name].value)
    return table


def _summary(stages: Sequence[Stage], states: dict[str, StageState], seconds: dict[str, float]) -> Table:
    did = {StageState.NEW: "done", StageState.STARTED: "resumed", StageState.DONE: "already done"}
    table = Table("stage", "state", "seconds", "result", title="Result")
    for stage in stages:
        took = f"{seconds[stage.name]:.0f}" if stage.name in seconds else ""
        table.add_row(stage.name, did[states[stage.name]], took, stage.result())
    return table
