"""Commands whose flags are the fields of their settings: positional arguments, flags and help."""

import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import typer
from typer.core import TyperGroup

from cavesson.errors import UserError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import Console

    from cavesson.config import Settings

S = TypeVar("S", bound="Settings")

FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Typer's settings for a command whose flags are the fields of its settings."""

Help = Annotated[
    bool, typer.Option("--help", help="Explain the settings; those of a group: --help GROUP, or --help all.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RecipeCommand = Annotated[str | None, typer.Option(help="Command of the recipe, if it fits several.")]
MAX_SETTINGS = 16
"""Commands with at most so many settings have them on one page."""
MOST_USED = (
    "model.path", "model.lora.rank", "data.path", "data.validation", "prompt", "rewards", "sampling.max_new_tokens",
    "kl.coef", "optimizer.learning_rate",
)  # fmt: skip
"""Settings inside groups that the overview shows."""


class Commands(TyperGroup):
    """A group of commands in which an unknown command is a UserError."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        known = f"did you mean {near[0]!r}?" if near else f"{ctx.command_path} --help lists them"
        raise UserError(f"there is no command {name!r}; {known}")


# To start fast, commands import what only some of them need inside functions.


def print_json(data: Any) -> None:
    """Print plain data as JSON, without characters that affect a terminal."""
    from cavesson.text.visible import safe_json

    write_data(f"{safe_json(json.dumps(data, ensure_ascii=False, indent=1))}\n")


def write_data(text: str) -> None:
    """Write text for programs to stdout, in UTF-8 unless it is a terminal."""
    if isinstance(sys.stdout, TextIOWrapper) and not sys.stdout.isatty():
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(text)


def words_and_flags(kind: Any, arguments: Sequence[str], *names: str) -> tuple[list[str], list[str]]:
    """Separate the positional arguments of a command from the flags of a class of settings, or several, in any order.

    Of the positional arguments, "[NAME]" is optional, and a last "NAME…" may be repeated.

    Returns:
        The positional arguments, and the flags as "--name=value".

    Raises:
        UserError: there are too few or too many positional arguments, or a flag is unknown or has no value.
    """
    from cavesson.config import separate

    words, flags = separate(kind, arguments)
    needed = [name for name in names if not name.startswith("[")]
    if len(words) < len(needed):
        raise UserError(f"missing argument {needed[len(words)]}; the command takes {' '.join(names)}, then flags")
    if len(words) > len(names) and not (names and names[-1].endswith("…")):
        raise UserError(f"unexpected argument {words[len(names)]!r}; the command takes {' '.join(names)}, then flags")
    return words, [f"--{name}={text}" for name, text in flags]


def console(stderr: bool = False) -> "Console":
    """Return the console."""
    from rich.console import Console

    return Console(stderr=stderr)


def load(kind: type[S], recipe: Path | None, flags: Sequence[str]) -> S:
    """Read settings with ``cavesson.config.load``, imported on demand."""
    from cavesson import config

    return config.load(kind, recipe, flags)


def arguments(
    context: typer.Context, help: bool, kind: type[S], *names: str, others: Sequence[str] = ()
) -> tuple[list[str], S]:
    """Return the positional arguments and the settings of a command; with `help`, explain them and exit.

    `names` are as for `words_and_flags`, `others` as for `explain`.
    """
    if help:
        explain(context, kind, " ".join(names), *others)
        raise typer.Exit
    words, flags = words_and_flags(kind, context.args, *names)
    return words, load(kind, None, flags)


class _Setting(NamedTuple):
    name: str
    type: str
    default: str
    help: str

    @property
    def group(self) -> str:
        return self.name.rpartition(".")[0]


def explain(
    context: typer.Context, kind: "type[BaseModel]", arguments: str, *others: str, values: "BaseModel | None" = None
) -> None:
    """Print the usage and settings of a command: an overview if there are many, or the settings of one group.

    The argument of the context is a group, or `all`. `arguments` are the command's positional ones, and `others` other
    ways to call it; the `values` of settings are shown as the defaults.

    Raises:
        UserError: there is no such group.
    """
    from cavesson.config import describe, groups

    settings = [_Setting(*one) for one in describe(kind, values=values)]
    titles = dict(groups(kind))
    wanted = next((word for word in context.args if not word.startswith("--")), None)
    if wanted is None:
        _print_usage(context.command_path, kind, arguments, others)
        if len(settings) > MAX_SETTINGS:
            _print_overview(context.command_path, settings, titles)
            return
    if wanted in (None, "all"):
        _print_settings(settings)
    else:
        _print_group(context.command_path, settings, titles, str(wanted))


def _print_usage(command: str, kind: "type[BaseModel]", arguments: str, others: Iterable[str]) -> None:
    from rich.text import Text

    lines = [f"Usage: {command} {arguments} [--setting value …]", *(f"       {command} {other}" for other in others)]
    console().print(Text("\n".join([*lines, "", " ".join((kind.__doc__ or "").split()), ""])))


def _print_overview(command: str, settings: list[_Setting], titles: dict[str, str]) -> None:
    """Print the settings outside groups, the most used of the others, and one line per group."""
    _print_settings([one for one in settings if not one.group and one.name not in titles])
    _print_settings([one for one in settings if one.name in MOST_USED], "most used", in_full=False)
    outer = {name: title for name, title in titles.items() if "." not in name}
    counts = {name: sum(one.name.startswith(f"{name}.") for one in settings) for name in outer}
    lines = {name: f"{title} ({counts[name]})" for name, title in outer.items()}
    _print_lines(
        ("group", f"explained by: {command} --help GROUP"),
        [*lines.items(), ("all", f"every setting ({len(settings)})")],
    )


def _print_group(command: str, settings: list[_Setting], titles: dict[str, str], wanted: str) -> None:
    name = wanted.replace("-", "_")
    if name not in titles:
        near = difflib.get_close_matches(name, [*titles, "all"], n=1)
        hint = f"did you mean {command} --help {near[0]}?" if near else f"{command} --help lists the groups"
        raise UserError(f"there is no group of settings {wanted!r}; {hint}")
    console().print(f"{name}: {' '.join(titles[name].split())}\n", highlight=False, markup=False)
    _print_settings([one for one in settings if one.name == name or one.group == name])
    inner = [(one, title) for one, title in titles.items() if one.startswith(f"{name}.")]
    if inner:
        _print_lines(("group", f"explained by: {command} --help GROUP"), inner)


def _print_settings(settings: Sequence[_Setting], title: str = "setting", in_full: bool = True) -> None:
    texts = [f"{one.help} ({_type(one)})" if in_full else one.help for one in settings]
    rows = [(f"--{one.name}", one.default, text) for one, text in zip(settings, texts, strict=True)]
    _print_lines((title, "default", "what it does"), rows, in_full)


def _type(one: _Setting) -> str:
    return one.type.removesuffix(" or none") if one.default == "none" else one.type


def _print_lines(titles: Sequence[str], rows: Iterable[Sequence[str]], in_full: bool = False) -> None:
    """Print a table; unless `in_full` is set, the last column is cut so that every row fits on one line."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=not in_full and title is not titles[-1])
    for *cells, last in rows:
        text = Text(" ".join(last.split()), no_wrap=not in_full, overflow="fold" if in_full else "ellipsis")
        table.add_row(*map(Text, cells), text)
    console().print(table)
    console().print()
