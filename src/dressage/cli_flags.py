"""What commands with settings share: their flags, their words and their help."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dressage.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from dressage.config import Settings

S = TypeVar("S", bound="Settings")

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer's settings for a command whose flags are the fields of its settings."""

Help = Annotated[bool, typer.Option("--help", help="Explain every setting.")]


def words_and_flags(arguments: Sequence[str], *names: str) -> tuple[list[str], list[str]]:
    """Tell the words of a command from its flags, wherever they stand.

    Args:
        arguments: of the command.
        names: what the words are; "[NAME]" may be left out, and of the last one, "NAME…", there may be several.

    Raises:
        UserError: there are too few or too many words.
    """
    words: list[str] = []
    flags: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            flags += [argument] if "=" in argument else [argument, *islice(rest, 1)]
        else:
            words.append(argument)
    needed = [name for name in names if not name.startswith("[")]
    if len(words) < len(needed):
        raise UserError(f"{needed[len(words)]} is missing; the command takes {' '.join(names)}, then flags")
    if len(words) > len(names) and not (names and names[-1].endswith("…")):
        raise UserError(f"{words[len(names)]!r} is one word too many; the command takes {' '.join(names)}, then flags")
    return words, flags


# Commands begin at once: what only some of them need is imported by those.


def console() -> "Console":
    """Returns the terminal."""
    from rich.console import Console

    return Console()


def load(kind: type[S], recipe: Path | None, flags: Sequence[str]) -> S:
    """Reads settings; as ``dressage.config.load``."""
    from dressage import config

    return config.load(kind, recipe, flags)


def explain(context: typer.Context, kind: "type[BaseModel]", arguments: str, *others: str) -> None:
    """Print how the command is called and what every setting does."""
    from rich.table import Table
    from rich.text import Text

    from dressage.config import describe

    terminal = console()
    terminal.print(Text(f"Usage: {context.command_path} {arguments} [--setting value …]"))
    for other in others:
        terminal.print(Text(f"       {context.command_path} {other}"))
    terminal.print(Text(f"\n{kind.__doc__}\n"))
    table = Table(box=None, pad_edge=False)
    for title in ("setting", "default", "what it does"):
        table.add_column(title, overflow="fold")
    for name, type_name, default, text in describe(kind):
        table.add_row(Text(f"--{name}"), Text(default), Text(f"{' '.join(text.split())} ({type_name})"))
    terminal.print(table)
