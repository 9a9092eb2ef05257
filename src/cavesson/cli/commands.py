"""A group of commands that says in one line which command was meant."""

import difflib
from typing import Any

from typer.core import TyperGroup

from cavesson.errors import UserError


class Commands(TyperGroup):
    """Commands, of which an unknown one is a user's mistake like any other."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
        known = f"did you mean {near[0]!r}?" if near else f"{ctx.command_path} --help lists them"
        raise UserError(f"there is no command {name!r}; {known}")
