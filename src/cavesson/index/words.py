"""Splits texts into words, all texts of a chunk at once.

A word is a sequence of letters and digits, a sequence of other signs, or one character of a script that is written
without spaces. Upper and lower case are equal.
"""

import sys
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from cavesson.index.columns import Array

SPACE, LETTER, SIGN, ALONE = range(4)
LONGEST = 64
"""A longer run is cut into pieces of this length that overlap by half, so that no part of half of it is lost."""
OVERLAP = LONGEST // 2
WINDOW = 1 << 17
"""Characters whose hashes are computed together."""
_CHARACTERS = sys.maxunicode + 1
# Kana, CJK ideographs with their extensions and compatibility forms.
_ALONE = [(0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF)]
_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85"
_CASED = 0x20000
"""No character from here on has an upper case."""
# Odd, so that it has an inverse modulo 2^64.
_BASE = 0x9E3779B97F4A7C15


class Words(NamedTuple):
    """The words of a chunk of texts, in text order."""

    text: str
    """All texts in lower case, one after another."""
    document: Array
    """[W] which text each word is in."""
    start: Array
    """[W] where it starts in ``text``."""
    stop: Array
    """[W] where it ends."""
    hash: Array
    """[W] uint64, equal for equal words."""


def _of_category(category: str) -> int:
    if category[0] in "LNM" or category == "Cs":
        return LETTER
    return SPACE if category[0] == "Z" else SIGN


@cache
def _tables() -> tuple[Array, Array]:
    """Return the kind and the lower case of every code point."""
    categories = "".join(map(unicodedata.category, map(chr, range(_CHARACTERS))))
    names, of = np.unique(np.frombuffer(categories.encode(), "S2"), return_inverse=True)
    kinds = np.array([_of_category(name.decode()) for name in names], np.uint8)[of]
    kinds[[ord(space) for space in _SPACES]] = SPACE
    for first, last in _ALONE:
        kinds[first : last + 1] = ALONE
    lower = np.arange(_CHARACTERS, dtype=np.uint32)
    lower[:_CASED] = [ord(fold(chr(code))) for code in range(_CASED)]
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


def words(texts: Sequence[str]) -> Words:
    """Split texts into words."""
    kinds, lower = _tables()
    lengths = np.array([len(text) for text in texts], np.int64)
    starts = np.cumsum(lengths) - lengths
    points = lower[code_points("".join(texts))]
    begin, end = runs(kinds[points], starts)
    begin, end = _pieces(begin, end)
    document = np.searchsorted(starts, begin, side="right") - 1
    text = points.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    return Words(text, document, begin, end, _hashes(points, begin, end))


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


def _pieces(begin: Array, end: Array) -> tuple[Array, Array]:
    """Split words that are too long into overlapping pieces."""
    count = np.maximum(-(-(end - begin - LONGEST) // OVERLAP), 0) + 1
    if len(count) and count.max() > 1:
        word = np.repeat(np.arange(len(begin)), count)
        number = np.arange(len(word)) - np.repeat(np.cumsum(count) - count, count)
        begin, end = begin[word] + number * OVERLAP, np.minimum(begin[word] + number * OVERLAP + LONGEST, end[word])
    return begin, end


def mixed(values: Array) -> Array:
    """Return uint64 hashes: one changed bit of a value can change any bit of its hash (the end of splitmix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    last: Array = values ^ (values >> np.uint64(31))
    return last


@cache
def _powers(count: int) -> tuple[Array, Array]:
    """Return the powers of the base and of its inverse, modulo 2^64."""
    inverse = pow(_BASE, -1, 1 << 64)
    powers = []
    for number in (_BASE, inverse):
        factors = np.full(count, number, np.uint64)
        factors[:1] = 1
        powers.append(np.multiply.accumulate(factors))
    return powers[0], powers[1]


def _hashes(points: Array, begin: Array, end: Array) -> Array:
    """Return a polynomial hash of the mixed code points of each word, computed from prefix sums."""
    power, inverse = _powers(WINDOW + LONGEST)
    hashes = np.empty(len(begin), np.uint64)
    # One window at a time, to limit the use of memory; a word belongs to the window in which it starts.
    for start in range(0, len(points), WINDOW):
        terms = mixed(points[start : start + WINDOW + LONGEST].astype(np.uint64) + np.uint64(1))
        words = slice(*np.searchsorted(begin, [start, start + WINDOW]))
        first, stop = begin[words] - start, end[words] - start
        with np.errstate(over="ignore"):
            terms *= power[: len(terms)]
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
            hashes[words] = mixed((sums[stop] - sums[first]) * inverse[first])
    return hashes
