"""The fields of one row, each checked on access: the error for a wrong value is one line that names the row."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cavesson.data.notes import Notes
from cavesson.data.types import Content, Turn
from cavesson.errors import UserError

MARKS = ("weight", "train", "loss")
"""Fields of a message that say whether its turn is learned."""


class Row(NamedTuple):
    """One row as it was read from the source."""

    place: str
    """file and line, as messages name it"""
    values: Mapping[str, Any]
    format: str | None = None
    """what the file itself says its rows are"""
    padded: bool = False
    """whether null inside a value means an absent field, as in Arrow, where all objects have the same fields"""


class Skip(Exception):
    """This row cannot be used. The message says why; skipped rows are counted by message."""


class Fields:
    """The values of a row, and the notes that collect remarks about it."""

    def __init__(self, row: Row, notes: Notes):
        self.place, self.values, self._padded, self._notes = row.place, row.values, row.padded, notes

    def note(self, remark: str) -> None:
        """Record a remark about something in this row that was dropped or looks odd."""
        self._notes.add(remark, self.place)

    def has(self, name: str) -> bool:
        """Return whether the field has a value; null does not count."""
        return self.values.get(name) is not None

    def text(self, name: str) -> str:
        """Return a text field."""
        return self._text(self.values.get(name), name)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts."""
        values = self._list(name, "a list of texts", str)
        return [self._text(value, name) for value in values]

    def scored(self, name: str) -> list[tuple[float, str]]:
        """Return a list of `{score, text}` objects as tuples (score, text)."""
        values = self._list(name, 'a list such as [{"score": 0.5, "text": "…"}]', dict)
        return [(self._number(value.get("score"), name), self._text(value.get("text"), name)) for value in values]

    def content(self, name: str) -> Content:
        """Return a text, or the turns of a conversation."""
        return self.turns(name) if isinstance(self.values.get(name), list) else self.text(name)

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

    def margin(self) -> float | None:
        """Return the number in `margin`, or None if there is none; in CSV it is a text, possibly empty."""
        value = self.values.get("margin")
        return None if value in (None, "") else self._number(value, "margin")

    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """Return the offered tools, which are JSON objects or texts that contain them."""
        tools = parsed(self.values.get("tools") or [])
        tools = [parsed(tool) for tool in tools] if isinstance(tools, list) else [tools]
        tools = without_nulls(tools) if self._padded else tools
        objects = tuple(tool for tool in tools if isinstance(tool, dict))
        if len(objects) < len(tools):
            self.note("tools that are not JSON objects, which chat templates need, are skipped")
        return objects

    def inside(self, name: str) -> "Fields":
        """Return the fields of an object nested in this row."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(Row(f"{self.place}, {name!r}", value, padded=self._padded), self._notes)

    def without(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the fields other than these."""
        used = set(names)
        return {name: value for name, value in self.values.items() if name not in used}

    def _list(self, name: str, expected: str, kind: type) -> list[Any]:
        values = self.values.get(name)
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


def brief(value: Any) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:60] + "…"


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


def parsed(value: Any) -> Any:
    """Parse JSON contained in a text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
