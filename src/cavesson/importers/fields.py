"""The checks and conversions of a record's values that all formats share."""

import json
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from cavesson.importers.packing import is_number, is_text
from cavesson.importers.rollout import Broken, Inexact, Origin

MAX_STEP = 2**31 - 1
_WHOLE = re.compile(r"[0-9]{1,10}(\.0+)?", re.ASCII)
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", re.ASCII)


def text_of(record: Mapping[str, Any], key: str) -> str:
    """Return the text at ``key``; raise ``Broken`` if there is none."""
    value = record.get(key)
    if not is_text(value):
        raise _unexpected(record, key, "a string")
    return value


def number_of(record: Mapping[str, Any], key: str) -> float:
    """Return the number at ``key``; raise ``Broken`` if there is none.

    A decimal number written as text is accepted: ``json.dumps(…, default=str)`` turns numpy's numbers into texts.
    """
    value = record.get(key)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if not is_number(value):
        raise _unexpected(record, key, "a number")
    return value


def step_of(record: Mapping[str, Any], key: str = "step") -> int:
    """Return the step at ``key``; raise ``Broken`` if there is none. Integers written as text or float are accepted."""
    value = record.get(key)
    if (isinstance(value, str) and _WHOLE.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(float(value))
    if type(value) is not int or not 0 <= value <= MAX_STEP:
        raise _unexpected(record, key, "a whole number from 0")
    return value


def _unexpected(record: Mapping[str, Any], key: str, expected: str) -> Broken:
    found = excerpt(record[key]) if key in record else "missing"
    return Broken(f"{key!r} is {found}, expected {expected}")


def nested(value: Any, *path: str | int) -> Any:
    """Return the value at a path of keys and indices; None if there is none."""
    try:
        for key in path:
            value = value[key]
    except (KeyError, IndexError, TypeError):
        return None
    return value


def excerpt(value: Any, length: int = 60) -> str:
    """Return a value as JSON, truncated to ``length`` characters."""
    return to_json(value)[:length]


def conversation(value: Any, key: str) -> str:
    """Return a text, or a list of chat messages as text: each ``[role]`` on a separate line, then the content.

    Raises:
        Broken: The value is neither.
    """
    if isinstance(value, str):
        return text_of({key: value}, key)
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise Broken(f"{key!r} is {excerpt(value)}, expected a string or a list of messages")
    return text_of({key: "\n\n".join(map(message_text, value))}, key)


def message_text(message: Mapping[str, Any]) -> str:
    """Return a chat message as text: ``[role]``, the reasoning, the content, and tool calls as JSON."""
    texts = [content_text(message.get(key)) for key in ("reasoning_content", "content")]
    calls = message.get("tool_calls") or []
    texts += map(to_json, calls if isinstance(calls, list) else [calls])
    return "\n".join([f"[{message.get('role', '')}]", *filter(None, texts)])


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, nothing, or the texts in a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(content_text(part.get("text") if isinstance(part, Mapping) else part) for part in content)
    return to_json(content)


def group_of(prompt: str) -> int:
    """Return an integer that identifies the prompt: 53 bits of its hash, which a float64 represents exactly."""
    return int.from_bytes(blake2b(prompt.encode(errors="backslashreplace"), digest_size=8).digest()) >> 11


def with_rest(row: dict[str, Any], record: Mapping[str, Any], used: Iterable[str], place: Origin) -> dict[str, Any]:
    """Add the keys of the record that are not in ``used`` to the row as JSON in ``extra``, and return the row."""
    names = set(used)
    if rest := {key: value for key, value in record.items() if key not in names}:
        if not place.exact and _is_large(rest):
            raise Inexact
        row["extra"] = to_json(rest)
    return row


def _is_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return any(map(_is_large, value))
    return type(value) is float and abs(value) >= 2**63


def to_json(content: Any) -> str:
    """Return readable JSON that UTF-8 can encode: lone surrogates, which it cannot, are escaped."""
    return json.dumps(content, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
