"""Hashes of words, all words of a chunk of texts at once."""

from collections.abc import Sequence
from functools import cache

import numpy as np

from cavesson.sorted_arrays import Array
from cavesson.text.words import Split, code_points, split

LONGEST = 64
"""A longer word is cut into pieces of this length that overlap by half, so that no part of half of it is lost."""
OVERLAP = LONGEST // 2
WINDOW = 1 << 17
"""Characters whose hashes are computed together."""
# Odd, so that it has an inverse modulo 2^64.
_BASE = 0x9E3779B97F4A7C15


def pieces(texts: Sequence[str]) -> Split:
    """Split texts into words, and words that are too long into overlapping pieces."""
    cut = split(texts)
    count = np.maximum(-(-(cut.stop - cut.start - LONGEST) // OVERLAP), 0) + 1
    word = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(word)) - np.repeat(np.cumsum(count) - count, count)
    start = cut.start[word] + number * OVERLAP
    return Split(cut.text, cut.document[word], start, np.minimum(start + LONGEST, cut.stop[word]))


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


def hashes(cut: Split) -> Array:
    """Return [W] uint64, equal for equal words of at most ``LONGEST`` characters.

    It is a polynomial hash of the mixed code points of each word, computed from prefix sums.
    """
    power, inverse = _powers(WINDOW + LONGEST)
    points, begin, end = code_points(cut.text), cut.start, cut.stop
    found = np.empty(len(begin), np.uint64)
    # One window at a time, to limit the use of memory; a word belongs to the window in which it starts.
    for start in range(0, len(points), WINDOW):
        terms = mixed(points[start : start + WINDOW + LONGEST].astype(np.uint64) + np.uint64(1))
        words = slice(*np.searchsorted(begin, [start, start + WINDOW]))
        first, stop = begin[words] - start, end[words] - start
        with np.errstate(over="ignore"):
            terms *= power[: len(terms)]
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
            found[words] = mixed((sums[stop] - sums[first]) * inverse[first])
    return found
