"""The command that checks a recipe or a reward before training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import FLAGS, Json, RecipeCommand, console, print_json, words_and_flags
from cavesson.errors import UserError
from cavesson.registry import any_recipe

check_app = typer.Typer()


def _check_alone(words: Sequence[str], options: Mapping[str, object]) -> None:
    """Refuse what has no effect where a reward is examined alone."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    for one in (*words, *given):
        raise UserError(f"{one} has no effect with --reward, which examines a reward alone")


@check_app.command(context_settings=FLAGS)
def check(
    context: typer.Context,
    command: RecipeCommand = None,
    as_json: Json = False,
    memory: Annotated[
        float | None, typer.Option(help="Memory limit in gigabytes. Default: the memory of the machine.")
    ] = None,
    short_run: Annotated[
        bool | None,
        typer.Option(help="Train a few steps without KL penalty. Default: only if that takes seconds."),
    ] = None,
    rollouts: Annotated[int, typer.Option(help="Responses per step of the short run.", min=1)] = 64,
    short_steps: Annotated[int, typer.Option(help="Steps of the short run.", min=1)] = 4,
    reward: Annotated[
        str | None, typer.Option(help="Examine this reward alone: a run, folder, Hub name, or file.py:function.")
    ] = None,
    pairs: Annotated[str | None, typer.Option(help="Pairs, or responses, to examine the reward with.")] = None,
) -> None:
    """Report problems before training: cavesson check RECIPE.toml [--setting value …]; exit code 1 on errors."""
    from cavesson.plan.recipe import planned

    words, flags = words_and_flags(any_recipe(), context.args, "[RECIPE.toml]")
    if not words and not flags and reward is None:
        raise UserError("give a recipe: cavesson check RECIPE.toml, or examine a reward: cavesson check --reward NAME")
    if reward:
        _check_alone(words, {"command": command, "memory": memory, "short-run": short_run})
    runs = [] if reward else planned(Path(words[0]) if words else None, flags, command)
    from cavesson.check.run import Options, check_reward, check_run
    from cavesson.check.show import plain, show

    options = Options(memory, short_run, rollouts, short_steps, reward, pairs)
    reports = [check_reward(flags, options)] if reward else (check_run(run, options) for run in runs)
    failed, shown = False, []
    for report in reports:
        failed |= any(one.severity == "error" for one in report.findings)
        if as_json:
            shown.append(plain(report))
        else:
            show(console(), report)
    if as_json:
        print_json(shown)
    if failed:
        raise typer.Exit(1)
