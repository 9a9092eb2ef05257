"""What commands with settings share: their flags, their words and their help."""

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
    """Reads settings; as ``cavesson.config.load``."""
    from cavesson import config

    return config.load(kind, recipe, flags)
