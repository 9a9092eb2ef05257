"""The numbers of all rollouts, one raw file per column, which numpy maps into memory."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.folder import ColumnFile, State
from cavesson.record.schema import ROW_COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]

CODED = ("split", "finish_reason")
"""Text columns of few different values: a number stands for each, 255 for none."""
NUMERIC = {
    column.name: "<i8" if column.type == pa.int64() else "<i4" if pa.types.is_integer(column.type) else "<f4"
    for column in ROW_COLUMNS
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
}
READ = [*NUMERIC, *CODED, "reward_parts", "prompt"]
"""The columns of the rows that the index is made of."""
KEY = ("step", "sample", "attempt", "reward")
"""What a rollout is known by. The reward tells a record that was written anew with the same numbering."""
MISSING: dict[str, Any] = {"<f4": np.nan, "<i4": np.iinfo(np.int32).min, "<i8": np.iinfo(np.int64).min, "|u1": 255}


def arrays(table: pa.Table, codes: dict[str, list[str]]) -> dict[str, Array]:
    """Return the columns that the index stores for the columns ``READ`` of a table of [N] rows.

    ``codes`` are the values of each coded column so far; new values are appended in place.

    Returns:
        [N] arrays by name; ``prompt`` is a hash of the text.
    """
    columns = {name: _numbers(table[name], NUMERIC[name]) for name in NUMERIC}
    columns |= {name: codes_of(table[name], codes.setdefault(name, [])).astype(np.uint8) for name in CODED}
    columns |= {f"part/{name}": values for name, values in _parts(table["reward_parts"])}
    columns["gap"] = columns["reward"] - columns["ref_reward"]
    columns["prompt"] = _hashes(table["prompt"])
    # A column that was not measured in any of these rows is left out.
    return {name: values for name, values in columns.items() if name in KEY or not _is_missing(values).all()}


def append(folder: Path, state: State, columns: Mapping[str, Array], count: int) -> State:
    """Append ``count`` rows to the column files and return the state that includes them."""
    files = dict(state.columns)
    for name, values in columns.items():
        if name not in files:
            number = sum(column.file.startswith("column-") for column in files.values())
            files[name] = ColumnFile(f"column-{number:03d}", values.dtype.str, missing=state.rows > 0)
            write_at(folder / files[name].file, 0, np.full(state.rows, MISSING[values.dtype.str], values.dtype))
    for name, column in files.items():
        given = columns.get(name)
        added = np.full(count, MISSING[column.dtype], column.dtype) if given is None else given
        write_at(folder / column.file, state.rows, added)
        if not column.missing and _is_missing(added).any():
            files[name] = ColumnFile(column.file, column.dtype, missing=True)
    return state.with_(columns=files, rows=state.rows + count)


def mark_dead(folder: Path, state: State, rows: Array) -> State:
    """Record that these rows are no longer part of the run."""
    write_at(folder / "dead", state.dead, rows.astype("<i4"))
    return state.with_(dead=state.dead + len(rows))


def write_at(path: Path, start: int, values: Array) -> None:
    """Write numbers into a file, starting at index ``start``."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(start * values.itemsize)
        file.write(values.tobytes())


def _numbers(column: pa.ChunkedArray, dtype: str) -> Array:
    array = column.combine_chunks()
    if dtype == "<i4":
        array = array.cast(pa.int32())
    if dtype != "<f4":
        array = array.fill_null(MISSING[dtype])
    with np.errstate(over="ignore"):
        values: Array = array.to_numpy(zero_copy_only=False).astype(dtype)
    return values


def codes_of(column: pa.ChunkedArray, known: list[str], most: int = 255) -> Array:
    """Return [N] the index of each text among the known ones, of which there are at most ``most``; ``most`` for none.

    New texts are appended in place.
    """
    encoded = column.combine_chunks().dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    known.extend(text for text in texts if text not in known and len(known) < most)
    codes = [known.index(text) if text in known else most for text in texts]
    coded: Array = np.array([*codes, most])[encoded.indices.fill_null(len(codes)).to_numpy()]
    return coded


def _parts(column: pa.ChunkedArray) -> Iterator[tuple[str, Array]]:
    """Yield the name and [N] scores of each reward that any row has."""
    parts = column.combine_chunks()
    offsets = parts.offsets.to_numpy()
    rows = np.repeat(np.arange(len(parts)), np.diff(offsets))
    names = parts.keys.dictionary_encode()
    codes = names.indices.to_numpy()[offsets[0] : offsets[-1]]
    scores = parts.items.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    for code, name in enumerate(names.dictionary.to_pylist()):
        values = np.full(len(parts), np.nan, "<f4")
        values[rows[codes == code]] = scores[codes == code]
        yield name, values


def _hashes(column: pa.ChunkedArray) -> Array:
    """Return a hash per text; equal texts have equal hashes in every run."""
    encoded = column.cast(pa.large_string()).combine_chunks().dictionary_encode()  # a string array has 2 GB at most
    texts = pc.cast(encoded.dictionary, pa.large_binary()).to_pylist()
    hashes = [text_hash(text) for text in texts]
    indices = encoded.indices.fill_null(len(texts)).to_numpy()
    named: Array = np.array([*hashes, MISSING["<i8"]], "<i8")[indices]
    return named


def text_hash(text: bytes) -> int:
    """Return the 64-bit hash by which the index knows a prompt, given as UTF-8."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def _is_missing(values: Array) -> Array:
    missing: Array = np.isnan(values) if values.dtype.kind == "f" else values == MISSING[values.dtype.str]
    return missing
