"""The plain data of a turn with tools: calls and what they gave."""

from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a tool that the model asks for."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None
    """Why it cannot be made (such as "cannot be parsed"), with the name and arguments as far as they are known."""
    id: str | None = None
    """The identifier that the model gave it, in formats that have one; its answer names it."""


class Answered(NamedTuple):
    """What a call gave."""

    text: str
    """What the model sees; an error is the JSON text `{"error": …}`."""
    seconds: float
    error: str | None = None
