"""The beginnings of all prompts and responses, stored so that a hundred of them can be read in a few milliseconds.

The record compresses a thousand rollouts together, so reading one text there costs as much as reading all of them.
Here, rows are compressed in blocks of ``ROWS``, in the order in which they were added; the last rows are stored once
their block is full.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.blocks import Blocks
from cavesson.index.columns import Array
from cavesson.index.folder import TEXT_ROWS as ROWS
from cavesson.index.folder import State
from cavesson.index.snapshot import Snapshot
from cavesson.record import Run

LENGTH = 8_000
"""Characters that are kept of a text."""
PORTION = 1 << 16
"""Rows after which the state is written."""
CHUNK_ROWS = 4_096
CHUNK_BYTES = 4_000_000
NAME = "texts"


class RowTexts(NamedTuple):
    """Texts of some rows; the texts of superseded attempts are empty."""

    prompt: list[str]
    response: list[str]


def due(state: State) -> bool:
    """Return whether there is a complete block of rows whose texts are not stored."""
    return state.rows - state.texts >= ROWS


def store_texts(folder: Path, state: State, run: Run) -> State:
    """Store the texts of the next rows and return the state that includes them."""
    first, stop = state.texts, min(state.texts + PORTION, state.rows) // ROWS * ROWS
    Blocks(folder, NAME).append(first, _blocks(run, Snapshot(folder, state), first, stop))
    return state.with_(texts=stop)


def read_texts(run: Run, snapshot: Snapshot, rows: Array) -> RowTexts:
    """Return the beginnings of the texts of some rows, at most ``LENGTH`` characters of each."""
    if not len(rows):
        return RowTexts([], [])
    stored = rows < snapshot.state.texts
    if stored.all():
        return RowTexts(*(column.to_pylist() for column in _stored(snapshot, rows)))
    found = RowTexts([""] * len(rows), [""] * len(rows))
    parts = (stored, read_texts(run, snapshot, rows[stored])), (~stored, _recorded(run, snapshot, rows[~stored]))
    for there, texts in parts:
        for some, column in zip(found, texts, strict=True):
            for place, text in zip(np.flatnonzero(there).tolist(), column, strict=True):
                some[place] = text
    return found


def read_responses(run: Run, snapshot: Snapshot, rows: Array) -> pa.Array:
    """Return the full responses of some rows, none of which may be superseded."""
    found = pa.nulls(len(rows), pa.large_string())
    stored = rows < snapshot.state.texts
    if stored.any():
        place = pa.array(np.cumsum(stored) - 1, mask=~stored)
        found = _stored(snapshot, rows[stored]).response.take(place)
    if (lacking := np.flatnonzero(_cut(found) | ~stored)).size:
        keys = snapshot.keys(rows[lacking])
        whole = run.fetch(keys, ["response"])["response"].combine_chunks().cast(pa.large_string())
        found = pc.replace_with_mask(found, pa.array(np.isin(np.arange(len(rows)), lacking)), whole)
    return found


def _cut(texts: pa.Array) -> Array:
    """Return which stored texts may be longer in the record."""
    cut = pc.fill_null(pc.equal(pc.utf8_length(texts), LENGTH), False)
    return np.asarray(cut.to_numpy(zero_copy_only=False))


class _Columns(NamedTuple):
    prompt: pa.Array
    response: pa.Array


def _stored(snapshot: Snapshot, rows: Array) -> _Columns:
    """Return the stored texts of some rows."""
    blocks, of = np.unique(rows // ROWS, return_inverse=True)
    data = Blocks(snapshot.folder, NAME).read(snapshot.state.texts, blocks)
    lengths = np.empty((len(blocks), 2 * ROWS), np.int64)
    for i, block in enumerate(data):
        lengths[i] = np.frombuffer(block, "<i4", 2 * ROWS)
    middles = (8 * ROWS + lengths[:, :ROWS].sum(axis=1)).tolist()
    prompts = b"".join(block[8 * ROWS : middle] for block, middle in zip(data, middles, strict=True))
    responses = b"".join(block[middle:] for block, middle in zip(data, middles, strict=True))
    place = pa.array((of * ROWS + rows % ROWS).astype(np.int64))
    return _Columns(*(_strings(*c).take(place) for c in ((prompts, lengths[:, :ROWS]), (responses, lengths[:, ROWS:]))))


def _strings(data: bytes, lengths: Array) -> pa.Array:
    offsets = np.append(0, np.cumsum(lengths))
    if lengths.size and (lengths.min() < 0 or offsets[-1] != len(data)):
        raise ValueError("the texts of the index are damaged")
    return pa.LargeStringArray.from_buffers(lengths.size, pa.py_buffer(offsets), pa.py_buffer(data))


def _block(texts: RowTexts) -> bytes:
    """Return the byte lengths of all prompts and responses, followed by the texts."""
    encoded = [text.encode() for text in (*texts.prompt, *texts.response)]
    return np.array([len(text) for text in encoded], "<i4").tobytes() + b"".join(encoded)


def _blocks(run: Run, snapshot: Snapshot, first: int, stop: int) -> Iterator[bytes]:
    """Yield the blocks of the rows."""
    for chunk in _chunks(run, snapshot, first, stop):
        for start in range(0, len(chunk.prompt), ROWS):
            yield _block(RowTexts(*(texts[start : start + ROWS] for texts in chunk)))


def _chunks(run: Run, snapshot: Snapshot, first: int, stop: int) -> Iterator[RowTexts]:
    """Yield the texts of the rows, several blocks at a time, as many as fit well into memory."""
    size = ROWS
    while first < stop:
        chunk = _recorded(run, snapshot, np.arange(first, min(first + size, stop)))
        yield chunk
        first += len(chunk.prompt)
        length = max(sum(map(len, chunk.response)), 1)
        size = max(min(CHUNK_ROWS, 8 * size, size * CHUNK_BYTES // length) // ROWS, 1) * ROWS


def _recorded(run: Run, snapshot: Snapshot, rows: Array) -> RowTexts:
    """Return the beginnings of the texts of some rows, read from the record."""
    table = recorded(run, snapshot, rows, RowTexts._fields)
    columns = [pc.utf8_slice_codeunits(column, 0, LENGTH).to_pylist() for column in table.columns]
    return RowTexts(*([text or "" for text in texts] for texts in columns))


def recorded(run: Run, snapshot: Snapshot, rows: Array, columns: Sequence[str]) -> pa.Table:
    """Return columns of the record for some rows, null for rows whose attempt was superseded."""
    alive = np.ones(len(rows), np.bool_) if snapshot.alive is None else snapshot.alive[rows]
    table = run.fetch(snapshot.keys(rows[alive]), columns)
    return table if alive.all() else table.take(pa.array(np.cumsum(alive) - 1, mask=~alive))
