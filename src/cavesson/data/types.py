"""Rows of data after their format is recognised: texts and turns, before tokenization."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYSTEM = ("system", "developer")
"""Roles that may speak before the user."""
Parts = Sequence[Mapping[str, Any]]
"""Content in parts, such as `{"type": "text", "text": "…"}`."""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: str
    """system, user, assistant, or what a template calls its tools"""
    content: str | Parts | None
    """None if the message says something else, such as the call of a tool"""
    others: Mapping[str, Any] = field(default_factory=dict)
    """every other field, such as `tool_calls`, `tool_call_id` or `reasoning_content`"""
    learn: bool = field(default=True, compare=False)
    """False if the data marks this turn as not learned"""

    @property
    def message(self) -> dict[str, Any]:
        """The whole message, as `apply_chat_template` takes it."""
        return {"role": self.role, "content": self.content, **self.others}

    @property
    def text(self) -> str:
        """The content as one text: parts are concatenated."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(str(part.get("text", "")) for part in self.content)

    def texts(self) -> Iterator[str]:
        """Yield every text of the message except its role, nested ones too."""
        return texts_in([self.content, *self.others.values()])


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, and the names in its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        yield from texts_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


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
class Answered(Prompt):
    """A prompt with a response to it, which may take the place of one that the policy samples."""

    response: Content = ""


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a response to learn from. A plain text without a question is a response to the prompt ""."""

    prompt: Content
    response: Content
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Labelled:
    """A prompt with a response that is labelled as a good or a bad one."""

    prompt: Content
    response: Content
    label: bool
    """True if the response is a good one"""
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Pair:
    """Two responses to the same prompt, the first of which was preferred."""

    prompt: Content
    chosen: Content
    rejected: Content
    margin: float | None = None
    """by how much, where the data says so"""
    tools: Sequence[Mapping[str, Any]] = ()


AnyRow = Prompt | Demonstration | Pair | Labelled
"""A row of data of any kind."""
