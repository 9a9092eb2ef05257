"""Files that map features to rollouts: the words of a piece of the run, and the rows of each word.

Rows are numbered within blocks of 65,536, so that each takes two bytes. A feature with many rows is stored as a bitmap
instead of a list. Every feature has a number, unique in the whole index, in the order of first appearance.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array
from cavesson.index.folder import BLOCK, Piece
from cavesson.index.maps import mapped_table, read_ranges, write_table
from cavesson.sorted_arrays import distinct
from cavesson.text.features import slices

BITMAP_BYTES = BLOCK // 8
MANY = BLOCK // 16
"""A feature of at least so many rows of a block is smaller as a bitmap."""
PART = 1 << 20
"""Rows that are looked up together, so that little memory is needed."""


class New(NamedTuple):
    """Features that are in no earlier piece, in the order of their numbers."""

    hash: Array
    kind: Array
    text: list[str]


class Postings(NamedTuple):
    """The rows that have each feature: features in ascending order; the rows of each are contiguous and ascending."""

    feature: Array
    """[K] uint32."""
    counts: Array
    """[K] rows of each."""
    rows: Array
    """[sum of count] uint16, counted from the start of the block."""


def write_piece(
    folder: Path,
    piece: Piece,
    new: New,
    postings: Postings,
    held_out: Array | None = None,
    given: Array | None = None,
) -> None:
    """Write the two files of a piece: its new features, and the rows of all its features.

    ``held_out`` and ``given`` are [rows of the block] whether each is held out, and whether the data give its response;
    None if none is.
    """
    words = pa.table({"hash": new.hash, "kind": new.kind, "text": pa.array(new.text, pa.large_string())})
    write_table(folder / piece.name("words"), words)
    feature, count = postings.feature.astype(np.uint32), postings.counts.astype(np.uint32)
    apart = {"held_out": _among(postings, held_out), "given": _among(postings, given)}
    rows = pa.table({"feature": feature, "count": count, **apart, "rows": _packed(postings)})
    write_table(folder / piece.name("rows"), rows)


class PieceReader:
    """Reads the memory-mapped files of a piece."""

    def __init__(self, folder: Path, piece: Piece) -> None:
        self.piece = piece
        self._path = folder / piece.name("rows")
        self._rows, self._map = mapped_table(self._path)
        self.words, _ = mapped_table(folder / piece.name("words"))
        names = ("feature", "count", "held_out", "given")
        self.feature, self.counts, self.held_out, self.given = (
            self._rows[name].chunk(0).to_numpy() if self._rows.num_rows else np.empty(0, np.uint32) for name in names
        )
        """[K] features, how many rows have each, and how many of these are held out, or given by the data."""

    @cached_property
    def _packed(self) -> tuple[Array, Array]:
        """The offsets and bytes of the packed rows."""
        if not self._rows.num_rows:
            return np.zeros(1, np.int64), np.empty(0, np.uint8)
        _, offsets, data = self._rows["rows"].chunk(0).buffers()
        return np.frombuffer(offsets, np.int64), np.frombuffer(data or b"", np.uint8)

    def postings(self) -> Postings:
        """Return the rows of all features."""
        count = self.counts.astype(np.int64)
        rows = np.empty(int(count.sum()), np.uint16)
        target = np.concatenate([[0], np.cumsum(count)])
        offsets, data = self._packed
        for start, stop, is_many in _runs(count):
            packed = data[offsets[start] : offsets[stop]]
            found = np.flatnonzero(np.unpackbits(packed)) if is_many else packed.view(np.uint16)
            rows[target[start] : target[stop]] = found
        return Postings(self.feature, count, rows)

    def some(self, kept: Array) -> Postings:
        """Return the rows of the features at the given places."""
        count = self.counts[kept].astype(np.int64)
        rows = np.empty(int(count.sum()), np.uint16)
        target = np.cumsum(count) - count
        few, many = np.flatnonzero(count < MANY), np.flatnonzero(count >= MANY)
        rows[slices(target[few], count[few])] = np.frombuffer(b"".join(self._read(kept[few])), np.uint16)
        for i, bits in zip(many.tolist(), self._read(kept[many]), strict=True):
            rows[target[i] : target[i] + count[i]] = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8)))
        return Postings(self.feature[kept], count, rows)

    def mark(self, wanted: Array, mask: Array) -> None:
        """Set the rows that have any of the ``wanted`` features, [F] bool by number, in the mask of all rows."""
        kept = np.flatnonzero(wanted[self.feature])
        few, many = (kept[there] for there in (self.counts[kept] < MANY, self.counts[kept] >= MANY))
        block = mask[self.piece.block * BLOCK : self.piece.block * BLOCK + BLOCK]
        for part in _parts(few, self.counts[few]):
            block[np.frombuffer(b"".join(self._read(part)), np.uint16)] = True
        if len(many):
            found = np.bitwise_or.reduce([np.frombuffer(bits, np.uint8) for bits in self._read(many)])
            block |= np.unpackbits(found)[: len(block)].view(np.bool_)

    def _read(self, places: Array) -> list[bytes]:
        """Return the packed rows of the features at the given places."""
        offsets, data = self._packed
        begin = data.ctypes.data - np.frombuffer(self._map, np.uint8).ctypes.data
        return read_ranges(self._path, begin + offsets[places], begin + offsets[places + 1])


def merged(parts: list[Postings]) -> Postings:
    """Merge the postings of adjacent pieces of one block.

    The last row of a piece can be the first row of the next one if its response was split.
    """
    features = distinct(np.concatenate([part.feature for part in parts]))
    count = np.zeros(len(features), np.int64)
    for part in parts:
        count[np.searchsorted(features, part.feature)] += part.counts
    first = np.cumsum(count) - count
    rows, free = np.empty(int(count.sum()), np.uint16), first.copy()
    for part in parts:
        place = np.searchsorted(features, part.feature)
        rows[slices(free[place], part.counts)] = part.rows
        free[place] += part.counts
    again = np.append(False, rows[1:] == rows[:-1])[: len(rows)]
    again[first] = False
    if again.any():
        count -= np.add.reduceat(again.astype(np.int64), first)
        rows = rows[~again]
    return Postings(features, count, rows)


def _among(postings: Postings, some: Array | None) -> Array:
    """Return [K] how many of the rows of each feature are among some [rows of the block]; None for no row."""
    if some is None or not len(postings.rows):
        return np.zeros(len(postings.feature), np.uint32)
    start = np.cumsum(postings.counts) - postings.counts
    return np.add.reduceat(some[postings.rows], start, dtype=np.uint32)


def _parts(places: Array, counts: Array) -> Iterator[Array]:
    """Yield the places of some features in parts of about ``PART`` rows at most."""
    part = np.cumsum(counts, dtype=np.int64) // PART
    yield from np.split(places, np.flatnonzero(np.diff(part)) + 1)


def _runs(count: Array) -> Iterator[tuple[int, int, bool]]:
    """Yield (start, stop, is_many): ranges of adjacent features with few rows, and single features with many."""
    done = 0
    for many in np.flatnonzero(count >= MANY).tolist():
        yield done, many, False
        yield many, many + 1, True
        done = many + 1
    yield done, len(count), False


def _packed(postings: Postings) -> pa.Array:
    count = postings.counts.astype(np.int64)
    sizes = np.where(count < MANY, 2 * count, BITMAP_BYTES)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    source = np.concatenate([[0], np.cumsum(count)])
    data = np.empty(int(offsets[-1]), np.uint8)
    for start, stop, is_many in _runs(count):
        rows = postings.rows[source[start] : source[stop]]
        if is_many:
            bits = np.zeros(BLOCK, np.bool_)
            bits[rows] = True
            rows = np.packbits(bits)
        data[offsets[start] : offsets[stop]] = rows.view(np.uint8)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(count), buffers)
