"""Rows of data after their format is recognised: texts and turns, before tokenization."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    """system, user, assistant, or what a template calls its tools"""
    content: str


Content = str | tuple[Turn, ...]
"""Plain text, or the turns of a conversation, which a chat template makes text of."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with the other columns of its row."""

    prompt: Content
    columns: Mapping[str, Any] = field(default_factory=dict)
    """everything else the row holds; rewards get it"""
    tools: Sequence[Mapping[str, Any]] = ()
    """tools offered to the model, as chat templates take them"""


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a response to learn from. A plain text without a question is a response to the prompt ""."""

    prompt: Content
    response: Content
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Pair:
    """Two responses to the same prompt, the first of which was preferred."""

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float | None = None
    """by how much, where the data says so"""
