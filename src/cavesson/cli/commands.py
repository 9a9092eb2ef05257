"""A group of commands that suggests a command in one line if the given one is unknown."""

import difflib
from typing import Any

from typer.core import TyperGroup

from cavesson.errors import UserError


class Commands(TyperGroup):
    """A group of commands in which an unknown command is a UserError."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        known = f"did you mean {near[0]!r}?" if near else f"{ctx.command_path} --help lists them"
        raise UserError(f"there is no command {name!r}; {known}")
