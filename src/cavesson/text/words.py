"""What a word is, and how texts are split into words.

A word is a sequence of letters, digits and combining marks, a sequence of other signs, or one character of a script
that is written without spaces: kana and ideographs. Upper and lower case are equal.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cavesson.sorted_arrays import Array

SPACE, LETTER, SIGN, ALONE = range(4)
# Kana, CJK ideographs with their extensions and compatibility forms.
_ALONE = [(0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)]
A_LETTER = "(?:(?![{}])[^\\W_]|[\\u0300-\\u036f\\u0900-\\u0963\\u0966-\\u0dff])".format(
    "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _ALONE)
)
"""A regular expression for a letter of a spaced word; in ASCII, ``[^\\W_]``. `\\w` lacks accents and Indic vowel signs,
and has signs that are words."""
NO_LETTER_RE2 = r"(?:[^\p{{L}}\p{{N}}\x{{300}}-\x{{36f}}\x{{900}}-\x{{963}}\x{{966}}-\x{{dff}}]|[{}])".format(
    "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in _ALONE)
)
"""A regular expression of RE2 for any other character."""
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85"
_CHARACTERS = 0x110000
_CASED = 0x20000
"""No character from here on has an upper case."""
_PLANE_14 = (0xE0000, 0xE1000)
"""The tags and marks in it are the only letters or spaces from ``_CASED`` on that are not ``_ALONE``."""


class Split(NamedTuple):
    """The words of some texts, in text order."""

    text: str
    """All texts in lower case, one after another."""
    document: Array
    """[W] which text each word is in."""
    start: Array
    """[W] where it starts in ``text``."""
    stop: Array
    """[W] where it ends."""


def words(texts: Sequence[str]) -> list[list[str]]:
    """Return the words of each text, in lower case."""
    cut = split(texts)
    found = [cut.text[start:stop] for start, stop in zip(cut.start.tolist(), cut.stop.tolist(), strict=True)]
    edges = np.searchsorted(cut.document, np.arange(len(texts) + 1)).tolist()
    return [found[start:stop] for start, stop in pairwise(edges)]


def is_sign(word: str) -> bool:
    """Return whether a word is a sequence of signs, such as `,` or `:)`."""
    return kind_of(word[0]) == SIGN


def is_spaced(word: str) -> bool:
    """Return whether a word is a sequence of letters and digits, which spaces part from others."""
    return kind_of(word[0]) == LETTER


def contains(text: str, part: str) -> bool:
    """Return whether a text contains a part that is not the piece of a longer word: 1 is in `x = 1`, and not in `12`.

    Between characters that are written without spaces, every part is whole.
    """
    found = ((match.start(), match.start() + len(part)) for match in re.finditer(f"(?={re.escape(part)})", text))
    return any(
        not (_continues(text[start - 1 : start], part[0]) or _continues(text[stop : stop + 1], part[-1]))
        for start, stop in found
    )


def _continues(outside: str, edge: str) -> bool:
    return outside != "" and kind_of(outside) == LETTER and kind_of(edge) != ALONE


@cache
def kind_of(character: str) -> int:
    """Return SPACE, LETTER, SIGN or ALONE."""
    return ALONE if any(first <= ord(character) <= last for first, last in _ALONE) else _kind_of(character)


def _kind_of(character: str) -> int:
    """Return the same, of a character that is not ``ALONE``."""
    category = unicodedata.category(character)
    if category[0] in "LNM" or category == "Cs":
        return LETTER
    return SPACE if category[0] == "Z" or character in _SPACES else SIGN


@cache
def _tables() -> tuple[Array, Array]:
    """Return the kind and the lower case of every code point."""
    kinds, lower = np.full(_CHARACTERS, SIGN, np.uint8), np.arange(_CHARACTERS, dtype=np.uint32)
    for first, stop in ((0, _CASED), _PLANE_14):
        kinds[first:stop] = [_kind_of(chr(code)) for code in range(first, stop)]
    for first, last in _ALONE:
        kinds[first : last + 1] = ALONE
    folded = (chr(code).lower() for code in range(_CASED))
    lower[:_CASED] = [code if len(character) > 1 else ord(character) for code, character in enumerate(folded)]
    return kinds, lower


def code_points(text: str) -> Array:
    """Return the code point of each character."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def kinds_of(points: Array) -> Array:
    """Return SPACE, LETTER, SIGN or ALONE for each code point."""
    kinds: Array = _tables()[0][points]
    return kinds


def fold(text: str) -> str:
    """Return the text in lower case, converted character by character, so that positions do not change."""
    return text.lower() if text.isascii() else "".join(s if len(s := c.lower()) == 1 else c for c in text)


def split(texts: Sequence[str]) -> Split:
    """Split texts into words, all at once."""
    lengths = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    points = _tables()[1][code_points("".join(texts))]
    begin, end = runs(kinds_of(points), starts)
    document = np.searchsorted(starts, begin, side="right") - 1
    text = points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return Split(text, document, begin, end)


def runs(kind: Array, starts: Array) -> tuple[Array, Array]:
    """Return the start and end (exclusive) of every word, given the kind of each character and where texts start."""
    if not len(kind):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    new = np.empty(len(kind), np.bool_)
    new[0] = True
    new[1:] = (kind[1:] != kind[:-1]) | (kind[1:] == ALONE)
    new[starts[starts < len(kind)]] = True
    begin = np.flatnonzero(new)
    end = np.append(begin[1:], len(kind))
    real = kind[begin] != SPACE
    return begin[real], end[real]
