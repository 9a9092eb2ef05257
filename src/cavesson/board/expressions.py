"""Search texts as regular expressions for RE2, whose time is linear in the text but can still be long."""

import re
from collections.abc import Iterable, Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # Python's own parser, which has no public interface
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError

HIT = "cavesson_hit"
MAX_CHARACTERS = 32
"""Of a class that are looked up one by one."""
MAX_REPEATED = 8
"""Of the same character in a row that are looked up."""


def compiled(q: str, regex: bool) -> str:
    """Return an expression whose only group, named ``HIT``, captures the match; raise a UserError unless RE2 accepts
    it.
    """
    pattern = f"(?P<{HIT}>{_without_groups(q)})" if regex else f"(?i)(?P<{HIT}>{escaped(q)})"
    try:
        # Check the expression as it was given first, so that the error message refers to it.
        for candidate in (q, pattern) if regex else (pattern,):
            pc.match_substring_regex(pa.array([""]), candidate)
        pc.extract_regex_span(pa.array([""]), pattern)
    except pa.ArrowInvalid as error:
        reason = str(error).removeprefix("Invalid regular expression: ")
        raise UserError(f"invalid regular expression: {reason}") from None
    return pattern


def escaped(text: str) -> str:
    """Return an expression that matches exactly the text."""
    return "".join(c if c.isalnum() or ord(c) > 127 else f"\\x{ord(c):02x}" for c in text)


_PIECES = re.compile(
    r"\\Q.*?(?:\\E|$)|\\.|\[\^?\]?(?:\[:\^?\w+:\]|\\.|[^\]\\])*\]|\(\?P?<\w+>|\(\?|\{[0-9,]*\}|.", re.DOTALL
)


def _without_groups(pattern: str) -> str:
    """Return the expression with non-capturing groups, because Arrow requires every capturing group to be named."""
    pieces = _PIECES.findall(pattern)
    return "".join("(?:" if piece == "(" or piece.startswith(("(?P<", "(?<")) else piece for piece in pieces)


def required(pattern: str) -> list[frozenset[str]]:
    """Return sets of texts: every match of the expression contains one text of each set, ignoring case."""
    if "[[" in pattern or "[:" in pattern:
        return []  # the only syntax that RE2 interprets differently
    try:
        parsed = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return []  # RE2 accepts some expressions that Python does not
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
            found.append(frozenset().union(*(max(one, key=lambda texts: min(map(len, texts))) for one in choices)))
    stripped = [frozenset(map(str.strip, texts)) for texts in (*found, {text})]
    return list(dict.fromkeys(texts for texts in stripped if texts and all(texts)))


def _flat(items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield the items that a match must contain in sequence, with groups and required repetitions expanded."""
    for kind, value in items:
        if kind is _constants.SUBPATTERN and not value[1] & re.IGNORECASE:
            yield from _flat(value[3])
        elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            for _ in range(min(value[0], MAX_REPEATED)):
                yield from _flat(value[2])
            yield _constants.ANY, None  # other characters may come before the next item
        else:
            yield kind, value


def _of_class(items: Iterable[tuple[Any, Any]]) -> list[str]:
    """Return the characters of a class; none if it has many, or a category that cannot be listed."""
    found: list[str] = []
    for kind, value in items:
        if kind is _constants.LITERAL:
            found.append(chr(value))
        elif kind is _constants.RANGE and value[1] - value[0] < MAX_CHARACTERS:
            found += map(chr, range(value[0], value[1] + 1))
        elif kind is _constants.CATEGORY and value is _constants.CATEGORY_DIGIT:
            found += "0123456789"
        else:
            return []
    return found if len(found) <= MAX_CHARACTERS else []
