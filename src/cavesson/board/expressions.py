"""Search texts as regular expressions of RE2, which needs time in proportion to the text but can still need much."""

import re
from collections.abc import Iterable, Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # Python's own reading; there is no public one
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError

HIT = "cavesson_hit"
MOST_CHARACTERS = 32
"""Of a class that are looked up one by one."""
MOST_REPEATED = 8
"""Of the same character in a row that are looked up."""


def compiled(q: str, regex: bool) -> str:
    """Returns an expression whose one group of this name, ``HIT``, is what is sought.

    Raises:
        UserError: It is no regular expression that RE2 knows.
    """
    pattern = f"(?P<{HIT}>{_without_groups(q)})" if regex else f"(?i)(?P<{HIT}>{escaped(q)})"
    try:
        # As it was given first, for a message about what was given.
        for candidate in (q, pattern) if regex else (pattern,):
            pc.match_substring_regex(pa.array([""]), candidate)
        pc.extract_regex_span(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise UserError(f"this is no regular expression: {reason}") from None
    return pattern


def escaped(text: str) -> str:
    """Returns an expression that matches the text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


_PIECES = re.compile(
    r"\\Q.*?(?:\\E|$)|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\(\?P?<\w+>|\(\?|\{[0-9,]*\}|.", re.DOTALL
)


def _without_groups(pattern: str) -> str:
    """Returns the expression with groups that capture nothing: Arrow wants every other one named."""
    pieces = _PIECES.findall(pattern)
    return "".join("(?:" if piece == "(" or piece.startswith(("(?P<", "(?<")) else piece for piece in pieces)


def required(pattern: str) -> list[frozenset[str]]:
    """Returns sets of texts: every match of a regular expression holds one of each, upper and lower case aside."""
    if "[[" in pattern or "[:" in pattern:
        return []  # the one thing that means something else to RE2
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return []  # RE2 knows more than Python
    return [] if parsed.state.flags & re.IGNORECASE else _of_sequence(parsed)


def _of_sequence(items: Iterable[tuple[Any, Any]]) -> list[frozenset[str]]:
    found, text = [], ""
    for kind, value in _flat(items):
        if kind is _constants.LITERAL:
            text += chr(value)
            continue
        found.append(frozenset({text}))
        text = ""
        if kind is _constants.IN:
            found.append(frozenset(_of_class(value)))
        if kind is _constants.BRANCH and all(choices := [_of_sequence(branch) for branch in value[1]]):
            found.append(frozenset().union(*(max(choice, key=_shortest) for choice in choices)))
    stripped = [frozenset(map(str.strip, texts)) for texts in (*found, {text})]
    return list(dict.fromkeys(texts for texts in stripped if texts and all(texts)))


def _flat(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yields what must be there one after another: what groups hold, and what is repeated as often as it must be."""
    for kind, value in items:
        if kind is _constants.SUBPATTERN and not value[1] & re.IGNORECASE:
            yield from _flat(value[3])
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            for _ in range(min(value[0], MOST_REPEATED)):
                yield from _flat(value[2])
            yield _constants.ANY, None  # what follows may stand further on
        else:
            yield kind, value


def _of_class(items: Iterable[tuple[Any, Any]]) -> list[str]:
    """Returns the characters of a class; none if it has many, or a kind of them."""
    found: list[str] = []
    for kind, value in items:
        if kind is _constants.LITERAL:
            found.append(chr(value))
        elif kind is _constants.RANGE and value[1] - value[0] < MOST_CHARACTERS:
            found += map(chr, range(value[0], value[1] + 1))
        elif kind is _constants.CATEGORY and value is _constants.CATEGORY_DIGIT:
            found += "0123456789"
        else:
            return []
    return found if len(found) <= MOST_CHARACTERS else []


def _shortest(texts: frozenset[str]) -> int:
    return min(map(len, texts))
