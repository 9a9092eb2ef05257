"""Shared code of commands with settings: flags, positional arguments and help."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cavesson.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from cavesson.config import Settings

S = TypeVar("S", bound="Settings")

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer's settings for a command whose flags are the fields of its settings."""

Help = Annotated[
    bool, typer.Option("--help", help="Explain the settings; those of a group: --help GROUP, or --help all.")
]


def words_and_flags(arguments: Sequence[str], *names: str) -> tuple[list[str], list[str]]:
    """Separate the positional arguments of a command from its flags, in any order.

    Args:
        arguments: arguments of the command.
        names: names of the positional arguments; "[NAME]" is optional, and a last "NAME…" may be repeated.

    Raises:
        UserError: there are too few or too many positional arguments.
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


# To start fast, commands import what only some of them need inside functions.


def console() -> "Console":
    """Return the console."""
    from rich.console import Console

    return Console()


def load(kind: type[S], recipe: Path | None, flags: Sequence[str]) -> S:
    """Read settings with ``cavesson.config.load``, imported on demand."""
    from cavesson import config

    return config.load(kind, recipe, flags)
