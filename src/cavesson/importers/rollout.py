"""Rollouts with packed token columns, which every format returns, and the checks that all formats share."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from operator import countOf
from pathlib import Path
from struct import Struct, error
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import orjson

if TYPE_CHECKING:
    from cavesson.importers.prime_annotations import Annotations

MAX_STEP = 2**31 - 1
_PAIR = re.compile(rb'"\s*:')
"""The end of a key; texts may hold or begin with what looks like one."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*:)?')
"""A whole key or text, several times slower; the group is there for a key only."""
_NESTED = (dict, list)
_WHOLE = re.compile(r"[0-9]{1,10}(\.0+)?", re.ASCII)
EXACT = 2**53
"""From here on float64 has no room for every whole number."""


class Broken(Exception):
    """Raised for a record that is not a rollout of its format; the message says what was expected."""


class Inexact(Exception):
    """Raised if JSON to be kept may contain an integer beyond 64 bits; parse the record with ``parse_exactly`` then."""


class Place(NamedTuple):
    """The location of a record, and how it was read."""

    path: Path
    line: int
    """From 1; of a table, the row."""
    rank: int | None = None
    """Number of the process that wrote the file."""
    exact: bool = False
    """Whether ``parse_exactly`` read it."""


class Numbers(NamedTuple):
    """A list of numbers as native float64, so that no Python object per number is kept."""

    content: bytes
    size: int
    missing: tuple[int, ...] = ()
    """Where the source has null; ``content`` has NaN there."""


class Texts(NamedTuple):
    """A list of texts: their concatenation, and the number of characters of each."""

    content: str
    lengths: list[int]
    missing: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.lengths)


Values = Numbers | Texts


class Rollout(NamedTuple):
    """One rollout in the form that the record needs."""

    step: int
    row: dict[str, Any]
    """Columns of the record's rows that the source gives."""
    tokens: dict[str, Values]
    """Columns of the record's tokens, each as long as it came; ``mask`` where it is no plain padding at the end."""
    real: int
    """How many tokens, from the first, are no padding."""


@dataclass(frozen=True)
class Format:
    """An import format. To add one, define it in a new file and add it to the table in ``importers/__init__.py``."""

    name: str
    what: str
    patterns: tuple[str, ...]
    """Its files in a folder; the first pattern that any file matches is the one that is read."""
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether a record, whole and readable, is of this format."""
    rollouts: Callable[[dict[str, Any], Place], Iterable[Rollout]]
    """The rollouts of one record; raises ``Broken``."""
    ranks: bool = False
    """Whether the folder holds one file per process."""
    annotations: "Callable[[], Annotations] | None" = None
    """What is written about records after them, in files of its own; None = nothing."""


def pack(values: Any) -> Numbers | None:
    """Pack a list of numbers and nulls; return None for anything else, or if float64 cannot represent it exactly."""
    if not isinstance(values, list):
        return None
    try:
        content = Struct(f"{len(values)}d").pack(*values)
    except (error, OverflowError):
        return _pack_with_nulls(values)
    # Booleans would pack as numbers too, and integers beyond 2^53 would lose digits.
    if countOf(map(type, values), float) == len(values) or all(map(_is_exact, values)):
        return Numbers(content, len(values))
    return None


def _pack_with_nulls(values: list[Any]) -> Numbers | None:
    if not all(value is None or _is_exact(value) for value in values):
        return None
    missing = tuple(i for i, value in enumerate(values) if value is None)
    filled = [math.nan if value is None else value for value in values]
    return Numbers(Struct(f"{len(filled)}d").pack(*filled), len(filled), missing)


def _is_exact(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= EXACT)


def pack_whole(values: Any, low: int = -(2**31), high: int = 2**31 - 1) -> Numbers | None:
    """Pack a list of integers within bounds; return None for anything else."""
    if isinstance(values, list) and all(type(value) is int and low <= value <= high for value in values):
        return Numbers(Struct(f"{len(values)}d").pack(*values), len(values))
    return None


def pack_texts(values: Any) -> Texts | None:
    """Pack a list of texts and nulls; return None for anything else."""
    if not isinstance(values, list):
        return None
    missing: tuple[int, ...] = ()
    try:
        content = "".join(values)
    except TypeError:
        if not all(value is None or isinstance(value, str) for value in values):
            return None
        missing = tuple(i for i, value in enumerate(values) if value is None)
        values = [value or "" for value in values]
        content = "".join(values)
    return Texts(content, list(map(len, values)), missing) if is_text(content) else None


def is_text(value: Any) -> bool:
    """Whether a value is a string that UTF-8 can encode; JSON can contain escaped lone surrogates, which it cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_number(value: Any) -> bool:
    """Whether a float64 column can represent the value exactly."""
    return _is_exact(value)


def text_of(record: Mapping[str, Any], key: str) -> str:
    """Return the text at ``key``; raise ``Broken`` if there is none."""
    value: str = _there(record, key, "a string")
    if not is_text(value):
        _wrong(key, value, "a string")
    return value


def number_of(record: Mapping[str, Any], key: str) -> float:
    """Return the number at ``key``; raise ``Broken`` if there is none."""
    value: float = _there(record, key, "a number")
    if not is_number(value):
        _wrong(key, value, "a number")
    return value


def step_of(record: Mapping[str, Any], key: str = "step") -> int:
    """Return the step at ``key``; raise ``Broken`` if there is none. Integers written as text or float are accepted."""
    value = _there(record, key, "a whole number from 0")
    step = _whole(value)
    if step is None or not 0 <= step <= MAX_STEP:
        _wrong(key, value, "a whole number from 0")
    return step


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(float(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if type(value) is int else None


def _there(record: Mapping[str, Any], key: str, expected: str) -> Any:
    if key not in record:
        raise Broken(f"{key!r} is missing, expected {expected}")
    return record[key]


def _wrong(key: str, value: Any, expected: str) -> NoReturn:
    raise Broken(f"{key!r} is {excerpt(value)}, expected {expected}")


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
    parts = [f"[{message.get('role', '')}]", message.get("reasoning_content"), content_text(message.get("content"))]
    parts += map(to_json, message.get("tool_calls") or [])
    return "\n".join(part for part in parts if part)


def content_text(content: Any) -> str:
    """Return the text of a message's content: a text, nothing, or the texts in a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "".join(content_text(part.get("text") if isinstance(part, Mapping) else part) for part in content)
    return to_json(content)


def group_of(prompt: str) -> int:
    """Return an integer that identifies the prompt: 53 bits of its hash, which a float64 represents exactly."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest()) >> 11


def with_rest(row: dict[str, Any], record: Mapping[str, Any], used: Iterable[str], place: Place) -> dict[str, Any]:
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


def parse(line: bytes) -> Any:
    """Parse the JSON of a line. Integers beyond 64 bits become floats; see ``Inexact``.

    Raises:
        Broken: The line is not JSON, or an object has duplicate keys.
    """
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_exactly(line)
    if _has_twice(line, content):
        parse_exactly(line)
    return content


def _has_twice(line: bytes, content: Any) -> bool:
    """Whether a line has more key-value pairs than were parsed."""
    seen = len(_PAIR.findall(line))
    if isinstance(content, dict) and seen == len(content):
        return False
    keys = _keys(content)
    return seen != keys and sum(map(bool, _STRING.findall(line))) != keys


def _keys(content: Any) -> int:
    """Return the number of keys in all objects, however deeply nested."""
    count, left = 0, [content] if type(content) in _NESTED else []
    while left:
        one = left.pop()
        values = one
        if isinstance(one, dict):
            count += len(one)
            values = one.values()
        left += [value for value in values if type(value) in _NESTED]
    return count


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise Broken(f"the key {next(key for key in times if times[key] > 1)!r} comes twice")
    return content


def parse_exactly(line: bytes) -> Any:
    """Parse like ``parse``, but exactly and more slowly; NaN and infinities, which Python writes, are numbers.

    Raises:
        Broken: The line is not JSON, or an object has duplicate keys.
    """
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise Broken(f"expected one JSON object per line: {str(problem)[:200]}") from problem
