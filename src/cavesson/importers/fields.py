"""The checks and conversions of a record's values that all formats share."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, TypeGuard

from cavesson.importers.packing import is_number, is_text, pack
from cavesson.importers.rollout import Broken, Inexact, Origin
from cavesson.text.reach import reach

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

    A truth value is 1 or 0. A decimal number written as text is accepted: ``json.dumps(…, default=str)`` turns numpy's
    numbers into texts.
    """
    number = as_number(record.get(key))
    if number is None:
        raise _unexpected(record, key, "a number")
    return number


def as_number(value: Any) -> float | None:
    """Return a number, truth value or decimal number written as text as a float; None for anything else."""
    if isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    return float(value) if is_number(value) else None


def reward_of(record: Mapping[str, Any], key: str) -> float | None:
    """Return the reward at ``key``: a number, the sum of one number per token, or None where it is null or NaN.

    Trainers write null or NaN for a response that no reward has judged.

    Raises:
        Broken: It is anything else, or missing.
    """
    if is_unscored(record, key):
        return None
    scores = record.get(key)
    if isinstance(scores, list) and pack(scores) is not None and (given := [one for one in scores if one is not None]):
        return float(sum(given))
    return number_of(record, key)


def is_unscored(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a record says that it has no reward: the value is null or NaN."""
    value = record.get(key, 0.0)
    return value is None or (isinstance(value, float) and math.isnan(value))


def parts_of(values: Mapping[str, Any], place: Origin, without: Iterable[str] = ()) -> dict[str, float]:
    """Return the parts of a reward among some values: numbers, truth values, and texts in columns of numbers only."""
    skipped = set(without)
    parts = {}
    for key, value in values.items():
        if key not in skipped and is_text(key) and (not isinstance(value, str) or key in place.numeric):
            parts[key] = as_number(value)
    return {key: value for key, value in parts.items() if value is not None}


def whole(value: Any) -> int | None:
    """Return a whole number from 0, which may be written as text or float; None for anything else."""
    if (isinstance(value, str) and _WHOLE.fullmatch(value)) or (isinstance(value, float) and value.is_integer()):
        value = int(float(value))
    return value if type(value) is int and 0 <= value <= MAX_STEP else None


def step_of(record: Mapping[str, Any], key: str = "step") -> int:
    """Return the step at ``key``; raise ``Broken`` if there is none. Integers written as text or float are accepted."""
    step = whole(record.get(key))
    if step is None:
        raise _unexpected(record, key, "a whole number from 0")
    return step


def _unexpected(record: Mapping[str, Any], key: str, expected: str) -> Broken:
    found = excerpt(record[key]) if key in record else "missing"
    return Broken(f"{key!r} is {found}, expected {expected}")


def pick(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a column, which may be within another, as ``reward_model.ground_truth``; None without one."""
    return next(iter(reach(record, name)), None)


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
    """Return a text, or one or several chat messages as text: each ``[role]`` on a separate line, then the content.

    Raises:
        Broken: The value is neither.
    """
    if isinstance(value, str):
        return text_of({key: value}, key)
    if isinstance(value, Mapping) and "role" in value:
        value = [value]
    if not is_messages(value):
        raise Broken(f"{key!r} is {excerpt(value)}, expected a string or a list of messages")
    return text_of({key: "\n\n".join(map(message_text, value))}, key)


def is_messages(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """Whether a value is a list of chat messages."""
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


def message_text(message: Mapping[str, Any]) -> str:
    """Return a chat message as text: ``[role]``, reasoning, content, and tool calls and other fields as JSON."""
    texts = [content_text(message.get(key)) for key in ("reasoning_content", "content")]
    calls = message.get("tool_calls") or []
    texts += map(to_json, calls if isinstance(calls, list) else [calls])
    others = {key: value for key, value in message.items() if key not in _SHOWN and value not in (None, "", [], {})}
    return "\n".join([f"[{message.get('role', '')}]", *filter(None, texts), *([to_json(others)] if others else [])])


_SHOWN = ("role", "reasoning_content", "content", "tool_calls")


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, nothing, or the texts in a list of parts, other parts as JSON."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(map(_part_text, content))
    return to_json(content)


def _part_text(part: Any) -> str:
    return content_text(part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else part)


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


def scored(key: str, record: Mapping[str, Any]) -> list[str]:
    """Return the key of a reward if the record's column represents it; scores per token are kept elsewhere."""
    return [] if isinstance(record.get(key), list) else [key]


def _is_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_is_large, value.values()))
    if isinstance(value, list):
        return any(map(_is_large, value))
    return type(value) is float and abs(value) >= 2**63


def to_json(content: Any) -> str:
    """Return readable JSON that UTF-8 can encode: lone surrogates, which it cannot, are escaped."""
    return json.dumps(content, ensure_ascii=False, default=str).encode(errors="backslashreplace").decode()
