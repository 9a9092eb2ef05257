"""Files that tell which rollouts have a feature: the words of a piece of the run, and the rows of each word.

Rows are counted in blocks of 65,536, so that two bytes name one. A feature of many rows is a bitmap instead of a list.
Every feature has a number, given once for the whole index in the order of first appearance.
"""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dressage.index.columns import Array
from dressage.index.features import slices
from dressage.index.folder import BLOCK, Piece
from dressage.record.files import replacing

BITMAP_BYTES = BLOCK // 8
MANY = BLOCK // 16
"""A feature of at least so many rows of a block is smaller as a bitmap."""


class New(NamedTuple):
    """Features that no earlier piece has, in the order of their numbers."""

    hash: Array
    kind: Array
    text: list[str]


class Postings(NamedTuple):
    """Which rows have which feature: features by rising number, the rows of one together and rising."""

    feature: Array
    """[K] uint32."""
    counts: Array
    """[K] rows of each."""
    rows: Array
    """[sum of count] uint16, counted from the start of the block."""


def write_piece(folder: Path, piece: Piece, new: New, postings: Postings) -> None:
    """Writes the two files of a piece."""
    words = pa.table({"hash": new.hash, "kind": new.kind, "text": pa.array(new.text, pa.large_string())})
    _write(folder / piece.name("words"), words)
    rows = pa.table(
        {
            "feature": postings.feature.astype(np.uint32),
            "count": postings.counts.astype(np.uint32),
            "rows": _packed(postings),
        }
    )
    _write(folder / piece.name("rows"), rows)


class PieceReader:
    """Maps the files of a piece into memory."""

    def __init__(self, folder: Path, piece: Piece) -> None:
        self.piece = piece
        self._rows = _read(folder / piece.name("rows"))
        self.words = _read(folder / piece.name("words"))
        self.feature: Array = (
            self._rows["feature"].chunk(0).to_numpy() if self._rows.num_rows else np.empty(0, np.uint32)
        )
        self.counts: Array = self._rows["count"].chunk(0).to_numpy() if self._rows.num_rows else np.empty(0, np.uint32)

    @cached_property
    def _packed(self) -> tuple[Array, Array]:
        """Returns offsets and bytes of the packed rows."""
        _, offsets, data = self._rows["rows"].chunk(0).buffers()
        return np.frombuffer(offsets, np.int64), np.frombuffer(data or b"", np.uint8)

    def postings(self, kept: Array | None = None) -> Postings:
        """Returns the rows of all features, or of those at the places ``kept``."""
        kept = np.arange(len(self.feature)) if kept is None else kept
        count = self.counts[kept].astype(np.int64)
        if not len(kept):
            return Postings(self.feature[:0], count, np.empty(0, np.uint16))
        rows = np.empty(int(count.sum()), np.uint16)
        offsets, data = self._packed
        target = np.cumsum(count) - count
        few = np.flatnonzero(count < MANY)
        words = data[: len(data) // 2 * 2].view(np.uint16)
        rows[slices(target, count, few)] = words[slices(offsets[kept] // 2, count, few)]
        for i in np.flatnonzero(count >= MANY):
            bits = data[offsets[kept[i]] : offsets[kept[i]] + BITMAP_BYTES]
            rows[target[i] : target[i] + count[i]] = np.flatnonzero(np.unpackbits(bits))
        return Postings(self.feature[kept], count, rows)

    def mark(self, wanted: Array, mask: Array) -> None:
        """Sets in the mask of all rows those that have any of the features.

        Args:
            wanted: [F] bool, by the numbers of the features.
            mask: [rows of the index] bool.
        """
        kept = np.flatnonzero(wanted[self.feature])
        few = kept[self.counts[kept] < MANY]
        block = mask[self.piece.block * BLOCK : self.piece.block * BLOCK + BLOCK]
        block[self.postings(few).rows] = True
        if len(many := kept[self.counts[kept] >= MANY]):
            offsets, data = self._packed
            bits = np.zeros(BITMAP_BYTES, np.uint8)
            for i in many:
                bits |= data[offsets[i] : offsets[i] + BITMAP_BYTES]
            block |= np.unpackbits(bits)[: len(block)].view(np.bool_)


def merged(parts: list[Postings]) -> Postings:
    """Returns the postings of adjacent pieces of one block as those of one piece."""
    feature = np.concatenate([np.repeat(part.feature, part.counts) for part in parts])
    order = np.argsort(feature, kind="stable")
    features, count = np.unique(feature, return_counts=True)
    return Postings(features, count, np.concatenate([part.rows for part in parts])[order])


def _packed(postings: Postings) -> pa.Array:
    count = postings.counts.astype(np.int64)
    sizes = np.where(count < MANY, 2 * count, BITMAP_BYTES)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    data = np.zeros(int(offsets[-1]), np.uint8)
    source = np.cumsum(count) - count
    few = np.flatnonzero(count < MANY)
    data.view(np.uint16)[slices(offsets[:-1] // 2, count, few)] = postings.rows[slices(source, count, few)]
    for i in np.flatnonzero(count >= MANY):
        bits = np.zeros(BLOCK, np.bool_)
        bits[postings.rows[source[i] : source[i] + count[i]]] = True
        data[offsets[i] : offsets[i + 1]] = np.packbits(bits)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(count), buffers)


def _write(path: Path, table: pa.Table) -> None:
    with replacing(path) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def _read(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()
