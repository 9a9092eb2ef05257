"""The rollouts that can contain a text or match a regular expression, as far as the index alone can tell."""

from collections.abc import Collection, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.columns import Array
from cavesson.index.folder import BLOCK, Piece
from cavesson.index.postings import PieceReader
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import GIVEN, HELD_OUT, Split
from cavesson.sorted_arrays import contains
from cavesson.text.features import CHARACTER, LAST_CHARACTER, WORD
from cavesson.text.word_hashes import OVERLAP
from cavesson.text.words import ALONE, SIGN, SPACE, code_points, fold, kinds_of, runs


class Dictionary:
    """All features of an index, by number."""

    def __init__(self, folder: Path, pieces: tuple[Piece, ...]) -> None:
        self.readers = [PieceReader(folder, piece) for piece in pieces]
        tables = [reader.words for reader in self.readers]
        self.texts: pa.ChunkedArray = pa.chunked_array([c for t in tables for c in t["text"].chunks], pa.large_string())
        self.kinds: Array = np.concatenate([np.empty(0, np.uint8), *(table["kind"].to_numpy() for table in tables)])

    def found(self, how: str, text: str, kind: int = WORD) -> Array:
        """Return [F] bool: the features of a kind that contain, start with, end with or equal a text."""
        tests = {"contains": pc.match_substring, "starts": pc.starts_with, "ends": pc.ends_with, "equals": pc.equal}
        wanted: Array = tests[how](self.texts, text).to_numpy() & (self.kinds == kind)
        return wanted

    def numbers(self, hashes: Array) -> Array:
        """Return the numbers of the features that have one of the hashes."""
        parts = [contains(np.sort(hashes), reader.words["hash"].to_numpy()) for reader in self.readers]
        return np.flatnonzero(np.concatenate([np.empty(0, np.bool_), *parts]))

    def totals(self, split: Split) -> Array:
        """Return [F] how many rows of a split have each feature."""
        return self._totals[split]

    @cached_property
    def _totals(self) -> dict[Split, Array]:
        every, held_out, given = np.zeros((3, len(self.kinds)), np.int64)
        for reader in self.readers:
            every[reader.feature] += reader.counts
            held_out[reader.feature] += reader.held_out
            given[reader.feature] += reader.given
        return {"train": every - held_out - given, GIVEN: given, HELD_OUT: held_out}

    def rows(self, wanted: Array, count: int) -> Array:
        """Return [count] bool: the rows that have any of the features."""
        mask = np.zeros(count, np.bool_)
        if wanted.any():
            for reader in self.readers:
                reader.mark(wanted, mask)
        return mask

    def scores(self, features: Array, weights: Array, count: int) -> Array:
        """Return [count] for each row the sum of the weights of the given features that it has."""
        score = np.zeros(count, np.float32)
        weight = np.zeros(len(self.kinds), np.float32)
        weight[features] = weights
        for reader in self.readers:
            found = reader.some(np.flatnonzero(weight[reader.feature]))
            rows = reader.piece.block * BLOCK + found.rows.astype(np.int64)
            np.add.at(score, rows, np.repeat(weight[found.feature], found.counts))
        return score


@lru_cache(maxsize=8)
def dictionary(folder: Path, pieces: tuple[Piece, ...]) -> Dictionary:
    """Return the features of an index; cached until the index grows."""
    return Dictionary(folder, pieces)


class Part(NamedTuple):
    """A word of a search text, and whether it is the first or the last one."""

    text: str
    kind: int
    first: bool
    """Nothing comes before it, so that it may end a longer word."""
    last: bool


def parts_of(text: str) -> list[Part]:
    """Split a search text into words as the index splits responses."""
    text = fold(text)
    kind = kinds_of(code_points(text))
    begin, end = (places.tolist() for places in runs(kind, np.zeros(1, np.int64)))
    return [Part(text[a:b], int(kind[a]), a == begin[0], b == end[-1]) for a, b in zip(begin, end, strict=True)]


def is_exact(text: str) -> bool:
    """Return whether the index alone finds all rows with a text: a single word, too short to have been split."""
    parts = parts_of(text)
    return len(parts) == 1 and len(parts[0].text) <= OVERLAP


def holding(snapshot: Snapshot, text: str) -> Iterator[tuple[slice, Array]]:
    """Yield, for each piece of the index, its rows and which of them contain a text that ``is_exact``."""
    known = dictionary(snapshot.folder, snapshot.state.pieces)
    (part,), mask = parts_of(text), np.zeros(snapshot.rows, np.bool_)
    wanted = _features(known, part)
    for reader in known.readers:
        reader.mark(wanted, mask)
        rows = slice(reader.piece.first, reader.piece.stop)
        yield rows, mask[rows]


def candidates(snapshot: Snapshot, texts: Collection[str]) -> Array:
    """Return [rows] which rows can contain one of some texts; the texts must not start or end with a space.

    A single word is looked up within all words of the dictionary. For several words, the first must end a word and the
    last must start one; whether they are adjacent can only be checked in the text itself.
    """
    known = dictionary(snapshot.folder, snapshot.state.pieces)
    words = np.zeros(len(known.kinds), np.bool_)
    mask = np.zeros(snapshot.rows, np.bool_)
    for parts in map(parts_of, texts):
        if not parts:
            return np.ones(snapshot.rows, np.bool_)
        if len(parts) == 1:
            words |= _features(known, parts[0])
        else:
            mask |= _all_of(known, parts, snapshot.rows)
    return np.asarray(mask | known.rows(words, snapshot.rows))


def _all_of(known: Dictionary, parts: list[Part], count: int) -> Array:
    mask = known.rows(_features(known, parts[0]), count)
    for part in parts[1:]:
        mask &= known.rows(_features(known, part), count)
    return mask


def _features(known: Dictionary, part: Part) -> Array:
    text = part.text
    if len(text) == 1 and (part.first and part.last) and _is_character(text, part.kind):
        return known.found("equals", text, CHARACTER)
    if part.kind == ALONE:
        return known.found("equals", text)
    # Longer words are indexed in overlapping pieces, so that any half of one is within a single piece.
    if part.first and part.last:
        return known.found("contains", text[:OVERLAP])
    if part.first:
        return known.found("ends", text[-OVERLAP:])
    if part.last or len(text) > OVERLAP:
        return known.found("starts", text[:OVERLAP])
    return known.found("equals", text)


def _is_character(text: str, kind: int) -> bool:
    return kind == SIGN or (kind != SPACE and ord(text) < LAST_CHARACTER)
