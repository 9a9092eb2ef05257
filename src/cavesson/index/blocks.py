"""Compressed blocks of what belongs to ``ROWS`` rows each, so that some rows can be read in a few milliseconds.

Blocks are only appended: the file ``NAME`` holds them, and ``NAME-places`` the end of each one and its uncompressed
size in bytes.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array, write_at
from cavesson.index.folder import TEXT_ROWS as ROWS
from cavesson.index.maps import mapped, read_ranges

CODEC = pa.Codec("zstd", 3)


class Blocks(NamedTuple):
    """The blocks of one kind in an index."""

    folder: Path
    name: str

    def append(self, rows: int, blocks: Iterable[bytes]) -> None:
        """Append blocks to those of the first ``rows`` rows."""
        sizes, packed = [], []
        for block in blocks:
            sizes.append(len(block))
            packed.append(CODEC.compress(block, asbytes=True))
        end = int(self._places(rows)[-1, 0])
        ends = end + np.cumsum([len(block) for block in packed])
        write_at(self.folder / self.name, end, np.frombuffer(b"".join(packed), np.uint8))
        places = self.folder / f"{self.name}-places"
        if not rows:
            write_at(places, 0, np.zeros(2, "<i8"))
        write_at(places, 2 + 2 * (rows // ROWS), np.stack([ends, sizes], axis=1).astype("<i8"))

    def read(self, rows: int, numbers: Array) -> list[memoryview]:
        """Return the content of some of the blocks of the first ``rows`` rows; ``numbers`` are ascending."""
        places = self._places(rows)
        packed = read_ranges(self.folder / self.name, places[numbers, 0], places[numbers + 1, 0])
        sizes = places[numbers + 1, 1].tolist()
        return [memoryview(CODEC.decompress(block, size)) for block, size in zip(packed, sizes, strict=True)]

    def _places(self, rows: int) -> Array:
        """Return [1 + blocks, 2] the end and uncompressed size of each block, after a row of zeros."""
        if not rows:
            return np.zeros((1, 2), "<i8")
        return mapped(self.folder / f"{self.name}-places", "<i8", 2 + rows // ROWS * 2).reshape(-1, 2)
