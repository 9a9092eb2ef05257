"""Running the unfinished stages of a recipe."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep

from rich.console import Console
from rich.table import Table

from cavesson.align.checks import check_stage
from cavesson.align.stages import ComparisonStage, Stage, StageState, TrainingStage, with_full_paths
from cavesson.command_line import command_line
from cavesson.errors import UserError
from cavesson.processes import Processes, is_main
from cavesson.record.read.show import headline
from cavesson.record.write.writable import check_writable
from cavesson.tools.compare import compare, show
from cavesson.train.run import resume, train


def align(
    stages: Sequence[Stage], train: Callable[[TrainingStage], None] | None = None, accept_changes: bool = False
) -> None:
    """Run all stages of a recipe, in its order: skip those that are done, and continue those that were started.

    `train` runs a stage that trains in other processes; None = in this one. With `accept_changes`, a stage continues
    with rewards that have changed.

    Raises:
        UserError: the data of any stage is invalid, or a stage failed.
    """
    console = Console(quiet=not is_main())
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
                _run(stage, accept_changes)
        seconds[stage.name] = perf_counter() - start
    if is_main():  # the other processes may get here before the comparison is written
        console.print(_summary(stages, states, seconds))
        if trained := [stage.folder for stage in stages if isinstance(stage, TrainingStage)]:
            console.print(f"next     {command_line('board', *trained)}", highlight=False, markup=False, soft_wrap=True)


def run_stage(stages: Sequence[Stage], name: str, accept_changes: bool = False) -> None:
    """Run one stage of a recipe, in a process that the command has started for it after it has checked all stages."""
    stage = next(stage for stage in stages if stage.name == name)
    with _named(stage):
        _run(stage, accept_changes)


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
            check_stage(stage, known)


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
        table.add_row(stage.name, did[states[stage.name]], took, _result(stage))
    return table


def _run(stage: Stage, accept_changes: bool) -> None:
    """Run a stage, or continue it if it was started."""
    if isinstance(stage, TrainingStage):
        if stage.state is StageState.NEW:
            train(with_full_paths(stage.settings))
        else:  # a process on a cluster may even find it done: another one was lost at the end of the stage
            resume(stage.folder, stage.command, accept_changes)
        gc.collect()  # a run's objects form reference cycles, and the next stage needs the memory
    elif isinstance(stage, ComparisonStage):
        _compare(stage)


def _compare(stage: ComparisonStage) -> None:
    """Compare models in the first process; the others wait, outside the next stage, where they would be watched."""
    Processes(stage.settings.device)  # loading a model asks for them, and one alone would wait for the others
    if is_main():
        settings = with_full_paths(stage.settings)
        show(compare([_short(model) for model in settings.models], settings), Console(), settings.show)
    while stage.state is not StageState.DONE:
        sleep(1)


def _short(model: str) -> str:
    """Return the name of a model in the comparison: its path, relative to the working directory if it is inside."""
    path = Path(model)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else model


def _result(stage: Stage) -> str:
    """Return the result of a finished stage in a few words."""
    if not isinstance(stage, ComparisonStage):
        return headline(stage.folder) or ""
    columns = json.loads(stage.result.read_bytes())["columns"]
    means = [next(iter(column["rewards"].values()), None) for column in columns]
    rewards = ", ".join(f"{mean['mean']:.3f}" for mean in means if mean)
    return f"{f'rewards {rewards}; ' if rewards else ''}see {stage.folder}/comparison.html"
