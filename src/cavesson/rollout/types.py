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


class Turn(NamedTuple):
    """One turn of an episode, or one call or result in it, as the record keeps it."""

    role: str
    """assistant, tool or user"""
    text: str
    first_token: int
    """place of its first token after the first prompt of the episode"""
    tokens: int
    name: str | None = None
    """of the tool"""
    arguments: str | None = None
    """of the call, as JSON"""
    seconds: float | None = None
    """that the call took"""
    error: str | None = None
    reward: float | None = None
    """that the environment gave for the turn"""
