"""The features by which a response can be found: its words, its signs and letters, and frequent n-grams."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cavesson.sorted_arrays import Array, are_first, contains
from cavesson.text.word_hashes import hashes, mixed, pieces
from cavesson.text.words import SIGN, SPACE, Split, code_points, kinds_of

WORD, CHARACTER, NGRAM = range(3)
KINDS = ("word", "character", "ngram")
LAST_CHARACTER = 0x250
"""Letters before this one, and all signs, are features of their own: a search for one of them would otherwise have to
unite the rows of nearly all words."""
NGRAM_SHARE = 0.005
"""An n-gram counts in a chunk if this share of its documents has it."""
MIN_DOCUMENTS = 3
"""But at least so many documents."""


class Features(NamedTuple):
    """Features of a chunk of documents, by ascending hash; the ``documents`` of each are contiguous and ascending."""

    hash: Array
    """[K] uint64."""
    kind: Array
    """[K] WORD, CHARACTER or NGRAM."""
    counts: Array
    """[K] how many documents have it."""
    documents: Array
    """[sum of count] which documents."""
    start: Array
    """[K] where one stands in the text of the chunk."""
    stop: Array
    """[K] where that ends."""


def features(texts: Sequence[str], documents: Array | None = None) -> tuple[Features, str]:
    """Return the features of some documents, and the concatenated text to which their positions refer.

    ``documents`` are [T] those that the texts are parts of, numbered from 0, ascending; None if each is one.
    """
    documents = np.arange(len(texts)) if documents is None else documents
    cut = pieces(texts)
    cut, part = cut._replace(document=documents[cut.document]), cut.document
    count = int(documents[-1]) + 1 if len(documents) else 0
    of_words = hashes(cut)
    by_word = _grouped(of_words, cut.document, cut.start, cut.stop, WORD)
    characters = _characters(texts, documents, count, cut.text)
    least = max(MIN_DOCUMENTS, int(NGRAM_SHARE * count))
    parts = [by_word, *characters, *_ngrams(cut, of_words, part, by_word, least)]
    return _joined(parts), cut.text


def hash_of_character(code: Array) -> Array:
    """Return the hash of a character as a feature, which differs from the hash of the same character as a word."""
    return mixed(code.astype(np.uint64) + np.uint64(1 << 40))


def _grouped(hashes: Array, document: Array, start: Array, stop: Array, kind: int) -> Features:
    order = np.argsort(hashes, kind="stable")
    hashes, document = hashes[order], document[order]
    new_hash = are_first(hashes)
    kept = new_hash | are_first(document)
    first = np.flatnonzero(new_hash)
    feature = np.cumsum(new_hash)[kept] - 1
    count = np.bincount(feature, minlength=len(first))
    kinds = np.full(len(first), kind, np.uint8)
    place = order[first]
    return Features(hashes[first], kinds, count, document[kept], start[place], stop[place])


def _characters(texts: Sequence[str], documents: Array, count: int, text: str) -> list[Features]:
    """Return the documents that contain each sign and each letter of the Latin scripts."""
    points = code_points(text)
    document = np.repeat(documents, [len(text) for text in texts])
    kinds = kinds_of(points)
    latin = np.flatnonzero((kinds != SPACE) & (points < LAST_CHARACTER))
    other = np.flatnonzero((kinds == SIGN) & (points >= LAST_CHARACTER))
    signs = _grouped(hash_of_character(points[other]), document[other], other, other + 1, CHARACTER)
    return [_latin(points[latin], document[latin], latin, count), signs]


def _latin(points: Array, document: Array, place: Array, of: int) -> Features:
    """Do the same as ``_grouped`` by counting instead of sorting, as nearly all characters of a run are Latin."""
    cell = points.astype(np.int64) * of + document
    code, documents = np.divmod(np.flatnonzero(np.bincount(cell, minlength=1)), max(of, 1))
    first = np.zeros(LAST_CHARACTER, np.int64)
    first[points[::-1]] = place[::-1]
    codes, count = np.unique(code, return_counts=True)
    kinds = np.full(len(codes), CHARACTER, np.uint8)
    return Features(hash_of_character(codes), kinds, count, documents, first[codes], first[codes] + 1)


def _ngrams(cut: Split, hashes: Array, part: Array, by_word: Features, fewest: int) -> list[Features]:
    """Return pairs and triples of words of one text, ``part``, that occur in at least ``fewest`` documents.

    An n-gram occurs in no more documents than any of its parts, so only those with frequent parts are considered.
    """
    found = []
    frequent = contains(by_word.hash[by_word.counts >= fewest], hashes)
    for size in (2, 3):
        # Index i is the n-gram that starts with word i; it consists of the two shorter ones at i and i + 1.
        same = part[: len(hashes) - 1] == part[size - 1 :]
        begin = np.flatnonzero(frequent[:-1] & frequent[1:] & same)
        hashes = _paired(hashes[:-1], hashes[1:])
        grouped = _grouped(hashes[begin], cut.document[begin], cut.start[begin], cut.stop[begin + size - 1], NGRAM)
        kept = grouped.counts >= fewest
        found.append(_chosen(grouped, kept, grouped.documents[np.repeat(kept, grouped.counts)]))
        frequent = np.zeros(len(hashes), np.bool_)
        frequent[begin] = contains(found[-1].hash, hashes[begin])
    return found


def _paired(first: Array, second: Array) -> Array:
    with np.errstate(over="ignore"):
        return mixed(first * np.uint64(3) + mixed(second + np.uint64(1)))


def _joined(parts: list[Features]) -> Features:
    """Combine features of different kinds, by ascending hash."""
    joined = Features._make(np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(joined.hash, kind="stable")
    start = np.cumsum(joined.counts) - joined.counts
    return _chosen(joined, order, joined.documents[slices(start[order], joined.counts[order])])


def _chosen(found: Features, which: Array, documents: Array) -> Features:
    """Return the selected features with the given documents."""
    return Features(
        found.hash[which], found.kind[which], found.counts[which], documents, found.start[which], found.stop[which]
    )


def slices(start: Array, count: Array) -> Array:
    """Return the indices of the slices ``start`` to ``start + count``, one slice after another."""
    places = np.repeat(start - (np.cumsum(count) - count), count)
    places += np.arange(len(places))
    return places
