"""The command that converts configurations of TRL."""

from pathlib import Path
from typing import Annotated

import typer

from cavesson.cli.flags import console, write_data
from cavesson.errors import UserError, print_error

migration_app = typer.Typer()


@migration_app.command("from-trl")
def from_trl(
    config: Annotated[Path, typer.Argument(help="A configuration: .yaml, .json, or a script, which is not run.")],
    recipe: Annotated[Path | None, typer.Argument(help="The recipe to write; without it, it is printed.")] = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            help="sft, reward-model, dpo, cpo, orpo, kto, grpo, rloo or distill, if the configuration does not say it."
        ),
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes of TRL's run.", min=1)] = 1,
) -> None:
    """Convert a configuration of TRL: cavesson from-trl train.py recipe.toml."""
    from cavesson.integrations.trl_recipe.given import TRAINERS, read
    from cavesson.integrations.trl_recipe.recipe import recipe as converted

    if trainer not in (None, *TRAINERS):
        raise UserError(f"there is no trainer {trainer!r}: {', '.join(TRAINERS)}")
    given = read(config, trainer)
    text = converted(given, processes)
    if recipe is None:
        write_data(text)
        return
    if recipe.exists():
        raise UserError(f"{recipe} exists; name another file")
    recipe.write_text(text, encoding="utf-8")
    _check(recipe, given.command)
    console().print(f"wrote {recipe}; next: cavesson check {recipe} --command {given.command}", highlight=False)


def _check(recipe: Path, command: str) -> None:
    """Say which of the settings the recipe cannot have together."""
    from cavesson.config import load
    from cavesson.registry import ALGORITHMS

    try:
        load(ALGORITHMS[command].settings, recipe, [])
    except UserError as error:
        print_error(f"the recipe needs a correction: {error}")
