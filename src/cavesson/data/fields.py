"""The fields of one row, each checked on access: the error for a wrong value is one line that names the row."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from cavesson.data.from_numpy import from_numpy
from cavesson.data.notes import Notes
from cavesson.data.types import Content, Turn
from cavesson.errors import UserError
from cavesson.text.reach import parsed
from cavesson.text.visible import shortened

MARKS = ("weight", "train", "loss")
"""Fields of a message that say whether its turn is learned."""
_CONVERSATION = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
"""How a conversation begins that a file without lists, such as CSV, holds as a text."""


class Row(NamedTuple):
    """One row as it was read from the source."""

    place: str
    """file and line, as messages name it"""
    values: Mapping[str, Any]
    format: str | None = None
    """what the file itself says its rows are"""
    padded: bool = False
    """whether null inside a value means an absent field, as in Arrow, where all objects have the same fields"""
    original: Mapping[str, Any] | None = None
    """all its columns under their own names, where `values` has others"""


class Skip(Exception):
    """This row cannot be used. The message says why; skipped rows are counted by message."""


class Fields:
    """The values of a row, and the notes that collect remarks about it."""

    def __init__(self, row: Row, notes: Notes, *, chat: bool = False):
        self.place, self.values, self._padded, self._notes = row.place, row.values, row.padded, notes
        self.chat = chat
        """whether plain texts become conversations"""
        self.used = set[str]()
        """names of the fields that were read"""
        self.original = row.values if row.original is None else row.original
        """the columns under their own names"""

    def note(self, remark: str) -> None:
        """Record a remark about something in this row that was dropped or looks odd."""
        self._notes.add(remark, self.place)

    def has(self, name: str) -> bool:
        """Return whether the field has a value; null does not count."""
        return self.values.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text field."""
        return self._text(self._value(name), name)

    def added(self, name: str) -> str:
        """Return a text field that may be missing or empty."""
        return self.text(name) if self.has(name) else ""

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        values = self._list(name, "a list of texts", str)
        return [self._text(value, name) for value in values]

    def scored(self, name: str) -> list[tuple[float, str]]:
        """Return a list of `{score, text}` objects as tuples (score, text)."""
        values = self._list(name, 'a list such as [{"score": 0.5, "text": "…"}]', dict)
        return [(self._number(value.get("score"), name), self._text(value.get("text"), name)) for value in values]

    def content(self, name: str) -> Content:
        """Return a text, or the turns of a conversation, which may be JSON in a text."""
        value = self._value(name)
        is_conversation = isinstance(value, list | dict) or (isinstance(value, str) and _CONVERSATION.match(value))
        return self.turns(name) if is_conversation else self.text(name)

    def turns(self, name: str, role: str = "role", content: str = "content") -> tuple[Turn, ...]:
        """Return the turns of a conversation, whose messages are objects with a role and a content.

        A message keeps all its fields, except null and those of `MARKS`, which say whether it is learned.
        """
        expected = f'a list such as [{{"{role}": "user", "{content}": "…"}}]'
        messages = self._list(name, expected, dict)
        return tuple(self._turn(message, name, role, content, expected) for message in messages)

    def _turn(self, message: Mapping[str, Any], name: str, role: str, content: str, expected: str) -> Turn:
        message = without_nulls(message) if self._padded else message
        said = message.get(content)
        others = {key: value for key, value in message.items() if value is not None and key not in (role, content)}
        marks = {key: others.pop(key) for key in MARKS if key in others}
        is_content = isinstance(said, str) or (said is None and others) or _are_parts(said)
        if not isinstance(message.get(role), str) or not is_content or {"role", "content"} & set(others):
            raise self._wrong(name, expected, message)
        if wrong := [key for key, value in marks.items() if value not in (0, 1)]:
            raise UserError(
                f"{self.place}: {wrong[0]} = {brief(marks[wrong[0]])} of a message in {name!r}; it must be 1 (or true) "
                "for a turn that is learned, or 0 (or false)"
            )
        parts = None if said is None else _as_objects(said)
        return Turn(message[role], parts, others, learn=all(marks.values()))

    def has_from(self, name: str) -> bool:
        """Return whether a conversation calls its roles `from`, as ShareGPT does."""
        messages = parsed(self.values.get(name))
        first = messages[0] if isinstance(messages, list) and messages else messages
        return isinstance(first, dict) and "from" in first and "role" not in first

    def margin(self) -> float | None:
        """Return the number in `margin`, or None if there is none; in CSV it is a text, possibly empty."""
        value = self._value("margin")
        return None if value in (None, "") else self._number(value, "margin")

    def truth(self, name: str) -> bool:
        """Return a true or false field, which in CSV is a text."""
        value = self._value(name)
        truth = _TRUTHS.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(truth, bool):
            raise self._wrong(name, "true or false", value)
        return truth

    def history(self) -> tuple[Turn, ...]:
        """Return the earlier turns in `history`: pairs of a question and its answer, or messages."""
        values = parsed(self._value("history") or [])
        if not isinstance(values, list):
            raise self._wrong("history", _HISTORY, values)
        if values and all(isinstance(value, dict) for value in values):
            return self.turns("history")
        for value in values:
            if not isinstance(value, list) or len(value) != 2 or not all(isinstance(text, str) for text in value):
                raise self._wrong("history", _HISTORY, value)
        return tuple(turn for asked, answer in values for turn in (Turn("user", asked), Turn("assistant", answer)))

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the offered tools, which are JSON objects or texts that contain them."""
        tools = parsed(self._value("tools") or [])
        tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else [tools]
        tools = without_nulls(tools) if self._padded else tools
        objects = tuple(tool for tool in tools if isinstance(tool, dict))
        if len(objects) < len(tools):
            self.note("tools that are not JSON objects, which chat templates need, are skipped")
        return objects

    def inside(self, name: str) -> "Fields":
        """Return the fields of an object nested in this row."""
        value = parsed(self._value(name))
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(Row(f"{self.place}, {name!r}", value, padded=self._padded), self._notes, chat=self.chat)

    def of_data(self) -> dict[str, Any]:
        """Return all columns of the data under their own names, and those that were mapped under their new ones.

        The new names of fields that were read are left out.
        """
        mapped = {name: value for name, value in self.values.items() if name not in self.used}
        return {**self.original, **mapped}

    def _value(self, name: str) -> Any:
        self.used.add(name)
        return from_numpy(self.values.get(name))

    def _list(self, name: str, expected: str, kind: type) -> list[Any]:
        values = parsed(self._value(name))
        values = [values] if kind is dict and isinstance(values, dict) else values  # a single message
        if not isinstance(values, list) or not values or not all(isinstance(value, kind) for value in values):
            raise self._wrong(name, expected, values)
        return values

    def _text(self, value: Any, name: str) -> str:
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def _number(self, value: Any, name: str) -> float:
        try:
            number = float(value) if isinstance(value, int | float | str) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._wrong(name, "a number", value)
        return number

    def _wrong(self, name: str, expected: str, value: Any) -> UserError:
        if name not in self.values:
            return UserError(f"{self.place}: {name!r} is missing, expected {expected}")
        return UserError(f"{self.place}: {name!r} is {brief(value)}, expected {expected}")


_TRUTHS = {"true": True, "false": False}
_HISTORY = 'a list such as [["question", "answer"]]'


def is_empty(value: Any) -> bool:
    """Return whether a value holds nothing, also where a file without types, such as CSV, writes it as a text."""
    return value is None or (isinstance(value, str | list | dict) and (not value or value in ("[]", "{}")))


def brief(value: Any) -> str:
    """Return a value as JSON, shortened."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str))


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the fields of its objects that are null."""
    if isinstance(value, Mapping):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _are_parts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(part, str | dict) for part in value)


def _as_objects(content: Any) -> Any:
    """Return the content of a message; parts that are texts become objects, as the others are."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
