"""Roll-ups: a few numbers per step and column that say how its values lie, and that add up over processes.

A sketch counts values in bins that every roll-up shares, so that sketches are added bin by bin. A bin's key is the sign
and the leading bits of the float32: exponent and six bits after the leading one. A bin is thereby at most 1/64 as wide
as its values are large, and its middle at most 0.8 % away from any of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dressage.record.keys import rows_of_tokens
from dressage.record.precision import Array
from dressage.record.schema import ROW_COLUMNS, TOKEN_COLUMNS

BIN = 8
"""Positions that are summed together."""
ROLLUP_SCHEMA = pa.schema(
    {
        "step": pa.int32(), "split": pa.string(), "level": pa.string(), "column": pa.string(),
        "count": pa.int64(), "not_finite": pa.int64(),
        "sum": pa.float64(), "sum_squares": pa.float64(), "min": pa.float64(), "max": pa.float64(),
        "sketch_keys": pa.list_(pa.int16()), "sketch_counts": pa.list_(pa.int64()),
        "bin_counts": pa.list_(pa.int64()), "bin_sums": pa.list_(pa.float64()),
    }
)  # fmt: skip
ORDER = [("level", "ascending"), ("column", "ascending"), ("split", "ascending"), ("step", "ascending")]
_KEYS = ("step", "attempt", "rank", "group", "sample")
_NUMERIC = [
    c.name for c in ROW_COLUMNS if c.name not in _KEYS and (pa.types.is_integer(c.type) or pa.types.is_floating(c.type))
]
_SIGNALS = [column.name for column in TOKEN_COLUMNS if pa.types.is_floating(column.type)]
_DROPPED = 17
"""Bits of a float32 that a key lacks."""


class _Cells(NamedTuple):
    """Values and which group of lines, 0 to ``size`` − 1, each belongs to."""

    group: Array
    size: int
    values: Array

    @property
    def finite(self) -> "_Cells":
        there = np.isfinite(self.values)
        return _Cells(self.group[there], self.size, self.values[there])

    def sums(self, values: Array) -> Array:
        return np.bincount(self.group, values, minlength=self.size)


def rollups_of(rows: pa.Table, tokens: pa.Table) -> pa.Table:
    """Returns the roll-ups of some rollouts, a line per step, split and column that has values.

    Args:
        rows: Columns of ``ROW_COLUMNS``.
        tokens: Their tokens, columns of ``TOKEN_COLUMNS``; padding does not count.
    """
    steps, splits = _groups(rows)
    pairs, group = _unique_pairs(steps, splits)
    names = {int(code): name for code, name in zip(splits, _splits(rows).to_pylist(), strict=True)}
    where = {"step": [int(step) for step, _ in pairs], "split": [names[int(code)] for _, code in pairs]}
    parts = [ROLLUP_SCHEMA.empty_table()]
    for name, values in _row_values(rows):
        there = pc.is_valid(values).to_numpy(zero_copy_only=False)
        cells = _Cells(group[there], len(pairs), values.drop_null().to_numpy().astype(np.float64))
        parts.append(_lines(where, "row", name, cells, _sketches(cells.finite)))
    if len(tokens):
        tokens = tokens.filter(tokens["mask"]) if "mask" in tokens.column_names else tokens
        line, known = rows_of_tokens(rows, tokens)
        position = tokens["position"].to_numpy()
        for name, values in _token_values(tokens):
            there = known & pc.is_valid(values).to_numpy(zero_copy_only=False)
            numbers = pc.fill_null(values, np.nan).to_numpy().astype(np.float64)
            cells = _Cells(group[line[there]], len(pairs), numbers[there])
            finite = np.isfinite(cells.values)
            parts.append(_lines(where, "token", name, cells, _bins(cells.finite, position[there][finite])))
    return pa.concat_tables(parts)


def merged(rollups: pa.Table) -> pa.Table:
    """Returns one line per level, column, split and step, in this order, of lines from several files."""
    lines = rollups.select(ROLLUP_SCHEMA.names).cast(ROLLUP_SCHEMA).sort_by(ORDER).combine_chunks()
    if not lines.num_rows:
        return lines
    new = np.full(lines.num_rows, False)
    new[0] = True
    for name, _ in ORDER:
        codes = lines[name].combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
        new[1:] |= codes[1:] != codes[:-1]
    first, group = np.flatnonzero(new), np.cumsum(new) - 1
    if len(first) == len(new):
        return lines
    content = {name: lines[name].take(first) for name, _ in ORDER}
    for name in ("count", "not_finite", "sum", "sum_squares"):
        content[name] = np.add.reduceat(lines[name].to_numpy(), first)
    for name, extreme, absent in (("min", np.minimum, np.inf), ("max", np.maximum, -np.inf)):
        found = extreme.reduceat(pc.fill_null(lines[name], absent).to_numpy(), first)
        content[name] = pa.array(found, mask=np.isinf(found))
    content |= _merged_lists(lines, group, len(first), np.array(content["level"].to_pylist()) == "row")
    return pa.table({field.name: content[field.name] for field in ROLLUP_SCHEMA}, ROLLUP_SCHEMA)


def sketch(values: Array) -> tuple[Array, Array]:
    """Returns the keys, ascending, of the bins that the finite ones of the values are in, and how many are in each."""
    keys, counts = np.unique(_keys(values[np.isfinite(values)]), return_counts=True)
    return keys, counts


def edges(keys: Array) -> tuple[Array, Array]:
    """Returns the lower and the upper end of each bin; bin 0 is 0."""
    keys = np.asarray(keys, np.int64)
    near, far = _from_bits(np.abs(keys)), _from_bits(np.abs(keys) + 1)
    low, high = np.where(keys < 0, -far, near), np.where(keys < 0, -near, far)
    return np.where(keys == 0, 0.0, low), np.where(keys == 0, 0.0, high)


def quantiles(keys: Array, counts: Array, shares: Sequence[float]) -> Array:
    """Returns the middle of the bin of the value at each share (0 = smallest, 1 = largest); NaN of no values."""
    if not np.sum(counts):
        return np.full(len(shares), np.nan)
    low, high = edges(keys)
    ends = np.cumsum(counts)
    ranks = np.round(np.asarray(shares, np.float64) * (ends[-1] - 1))
    at = np.searchsorted(ends, ranks, side="right")
    return np.asarray(((low + high) / 2)[at])


def _keys(values: Array) -> Array:
    with np.errstate(over="ignore"):
        narrow = np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
    size = (np.abs(narrow).view(np.uint32) >> _DROPPED).astype(np.int16)
    return np.where(narrow < 0, -size, size).astype(np.int16)


def _from_bits(keys: Array) -> Array:
    found = (keys.astype(np.uint32) << _DROPPED).view(np.float32).astype(np.float64)
    return np.where(np.isinf(found), 2.0**128, found)  # the end of the last bin


def _splits(rows: pa.Table) -> pa.ChunkedArray:
    return rows["split"] if "split" in rows.column_names else pa.chunked_array([pa.nulls(len(rows), pa.string())])


def _groups(rows: pa.Table) -> tuple[Array, Array]:
    """Returns each row's step and a number of its split."""
    codes = pc.fill_null(_splits(rows).combine_chunks().dictionary_encode().indices, -1)
    return rows["step"].to_numpy().astype(np.int64), codes.to_numpy().astype(np.int64)


def _unique_pairs(first: Array, second: Array) -> tuple[Array, Array]:
    pairs, group = np.unique(np.stack([first, second], axis=1), axis=0, return_inverse=True)
    return pairs, group.reshape(-1)


def _row_values(rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name in _NUMERIC:
        if name in rows.column_names:
            yield name, rows[name].combine_chunks()
    if "ref_reward" in rows.column_names:
        yield "gap", pc.subtract(rows["reward"], rows["ref_reward"]).combine_chunks()
    if "reward_parts" in rows.column_names:
        yield from _parts(rows["reward_parts"].combine_chunks())


def _parts(maps: pa.MapArray) -> Iterator[tuple[str, pa.Array]]:
    """Yields each part of the reward with its value in every row, null where a row lacks it."""
    names, values = maps.keys, maps.items
    offsets = maps.offsets.to_numpy()
    row = np.repeat(np.arange(len(maps)), np.diff(offsets))
    names, values = (array.slice(offsets[0], offsets[-1] - offsets[0]) for array in (names, values))
    for name in pc.unique(names).to_pylist():
        mine = pc.equal(names, name).to_numpy(zero_copy_only=False)
        column = np.full(len(maps), np.nan)
        absent = np.full(len(maps), True)
        column[row[mine]] = pc.fill_null(values, np.nan).to_numpy()[mine]
        absent[row[mine]] = pc.is_null(values).to_numpy(zero_copy_only=False)[mine]
        yield f"part/{name}", pa.array(column, mask=absent)


def _token_values(tokens: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name in _SIGNALS:
        if name in tokens.column_names:
            yield name, tokens[name].combine_chunks()
    if {"logprob", "ref_logprob"} <= set(tokens.column_names):
        wide = [tokens[name].cast(pa.float64()) for name in ("logprob", "ref_logprob")]
        yield "log_ratio", pc.subtract(*wide).combine_chunks()


def _lines(
    where: Mapping[str, Sequence[object]], level: str, column: str, cells: _Cells, lists: Mapping[str, pa.Array]
) -> pa.Table:
    """Returns the lines of one column, of the groups in which it has values."""
    finite = cells.finite
    low, high = np.full(cells.size, np.inf), np.full(cells.size, -np.inf)
    np.minimum.at(low, finite.group, finite.values)
    np.maximum.at(high, finite.group, finite.values)
    count = np.bincount(finite.group, minlength=cells.size)
    not_finite = np.bincount(cells.group, minlength=cells.size) - count
    with np.errstate(over="ignore"):
        squares = finite.sums(finite.values**2)
    content = {
        **where,
        "level": [level] * cells.size,
        "column": [column] * cells.size,
        "count": count,
        "not_finite": not_finite,
        "sum": finite.sums(finite.values),
        "sum_squares": squares,
        "min": pa.array(low, mask=count == 0),
        "max": pa.array(high, mask=count == 0),
        **lists,
    }
    arrays = [
        pa.array(content[field.name], field.type) if field.name in content else pa.nulls(cells.size, field.type)
        for field in ROLLUP_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=ROLLUP_SCHEMA).filter(pa.array(count + not_finite > 0))


def _sketches(cells: _Cells) -> dict[str, pa.Array]:
    return _sketch_lists(cells.group, _keys(cells.values), np.ones(len(cells.group), np.int64), cells.size)


def _sketch_lists(
    group: Array, keys: Array, counts: Array, size: int, there: Array | None = None
) -> dict[str, pa.Array]:
    """Returns the sketches of ``size`` groups, of keys that may come several times."""
    pairs, at = np.unique((group.astype(np.int64) << 16) + keys + (1 << 15), return_inverse=True)
    owner = pairs >> 16
    total = np.bincount(at, counts, minlength=len(pairs)).astype(np.int64)
    found = {"sketch_keys": ((pairs & 0xFFFF) - (1 << 15)).astype(np.int16), "sketch_counts": total}
    return {name: _lists(owner, size, values, there) for name, values in found.items()}


def _bins(cells: _Cells, position: Array) -> dict[str, pa.Array]:
    return _bin_lists(cells.group, position // BIN, np.ones(len(position)), cells.values, cells.size)


def _bin_lists(
    group: Array, at: Array, counts: Array, sums: Array, size: int, there: Array | None = None
) -> dict[str, pa.Array]:
    """Returns the bins of ``size`` groups, each to the last that has a value; a bin may come several times."""
    width = np.zeros(size, np.int64)
    np.maximum.at(width, group, at + 1)
    flat = (np.cumsum(width) - width)[group] + at
    owner = np.repeat(np.arange(size), width)
    found = {
        "bin_counts": np.bincount(flat, counts, minlength=len(owner)).astype(np.int64),
        "bin_sums": np.bincount(flat, sums, minlength=len(owner)),
    }
    return {name: _lists(owner, size, values, there) for name, values in found.items()}


def _merged_lists(lines: pa.Table, group: Array, size: int, is_row: Array) -> dict[str, pa.Array]:
    def flat(name: str) -> Array:
        return np.asarray(lines[name].combine_chunks().flatten())

    def owners(name: str) -> tuple[Array, Array]:
        """Returns the group of each entry of the lists, and its index in its list."""
        length = pc.fill_null(pc.list_value_length(lines[name]), 0).to_numpy()
        index = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return np.repeat(group, length), index

    keys_group, _ = owners("sketch_keys")
    bins_group, at = owners("bin_counts")
    return {
        **_sketch_lists(keys_group, flat("sketch_keys"), flat("sketch_counts"), size, is_row),
        **_bin_lists(bins_group, at, flat("bin_counts"), flat("bin_sums"), size, ~is_row),
    }


def _lists(owner: Array, size: int, values: Array, there: Array | None = None) -> pa.Array:
    """Returns ``size`` lists of the values by their owners, ascending; null where they are not there."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=size))])
    mask = None if there is None else pa.array(~there)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=mask)
