"""Roll-ups: a few numbers per step and column that summarise its distribution and can be merged across processes.

A sketch counts values in bins that all roll-ups share, so that sketches are added bin by bin. The key of a bin is the
sign and the leading bits of the float32: the exponent and six bits after the leading one. The width of a bin is
therefore at most 1/64 of the magnitude of its values, and its midpoint is within 0.8 % of each of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.record.derived import DERIVED
from cavesson.record.keys import rows_of_tokens, starts_of_runs
from cavesson.record.precision import Array
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS
from cavesson.sorted_arrays import are_first

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


@dataclass(frozen=True)
class _Groups:
    """The group, 0 to ``size`` − 1, of each row."""

    group: Array
    size: int

    @cached_property
    def starts(self) -> Array:
        """The first row of each run of rows of one group; the rows of a group are mostly contiguous."""
        return starts_of_runs(self.group)

    def chosen(self, there: Array) -> "_Groups":
        return self if there.all() else _Groups(self.group[there], self.size)

    def counts(self) -> Array:
        length = np.diff(self.starts, append=len(self.group))
        return np.bincount(self.group[self.starts], length, minlength=self.size).astype(np.int64)

    def reduced(self, of: np.ufunc, values: Array, empty: float) -> Array:
        """Return the sum, minimum or maximum of each group's values; ``empty`` for a group without values."""
        found = np.full(self.size, empty, values.dtype)
        if len(values):
            with np.errstate(over="ignore", invalid="ignore"):
                of.at(found, self.group[self.starts], of.reduceat(values, self.starts))
        return found


@dataclass(frozen=True)
class _Bins:
    """The bin of each row within its group; a group has bins up to the last one that contains a row."""

    groups: _Groups
    at: Array

    @cached_property
    def width(self) -> Array:
        """[size] number of bins of each group."""
        return self.groups.reduced(np.maximum, self.at.astype(np.int64) + 1, 0)

    @cached_property
    def each(self) -> _Groups:
        """The bin of each row, with the bins of all groups numbered consecutively."""
        before = np.cumsum(self.width) - self.width
        return _Groups(before[self.groups.group] + self.at, int(self.width.sum()))

    def sums(self, values: Array) -> Array:
        return self.each.reduced(np.add, values, 0)

    def chosen(self, there: Array) -> "_Bins":
        return self if there.all() else _Bins(self.groups.chosen(there), self.at[there])

    def lists(self, counts: Array, sums: Array, there: Array | None = None) -> dict[str, pa.Array]:
        """Return the bins of each group as lists; null where ``there`` is false."""
        owner = np.repeat(np.arange(self.groups.size), self.width)
        found = {"bin_counts": counts.astype(np.int64), "bin_sums": sums}
        return {name: _lists(owner, self.groups.size, values, there) for name, values in found.items()}


def rollups_of(rows: pa.Table, tokens: pa.Table) -> pa.Table:
    """Return the roll-ups of some rollouts, with one row per step, split and column that has values.

    Tokens that were not learned are ignored.
    """
    where, group = _groups(rows)
    parts: list[_Lines] = []
    groups = _Groups(group, len(where["step"]))
    for name, values in _row_values(rows):
        numbers, there = _numbers(values)
        shown = there & np.isfinite(numbers)
        finite, values = groups.chosen(shown), _chosen(numbers, shown)
        measured = groups.chosen(there).counts()
        sketches = _sketch_lists(finite.group, _keys(values), np.ones(len(values), np.int64), finite.size)
        parts.append(_lines("row", name, finite, values, measured, sketches))
    if len(tokens):
        if "learned" in tokens.column_names and not pc.all(tokens["learned"]).as_py():
            tokens = tokens.filter(tokens["learned"])
        parts += _token_lines(where, tokens, group, *rows_of_tokens(rows, tokens))
    return _table(where, parts)


def _token_lines(
    where: Mapping[str, list[Any]], tokens: pa.Table, group: Array, line: Array, has_row: Array
) -> Iterator["_Lines"]:
    groups = _Groups(group[line], len(where["step"]))
    bins = _Bins(groups, tokens["position"].to_numpy() // BIN)
    for name, numbers, valid in _token_values(tokens):
        there = has_row & valid
        shown = there & np.isfinite(numbers)
        finite, values = bins.chosen(shown), _chosen(numbers, shown)
        lists = finite.lists(finite.each.counts(), finite.sums(values))
        yield _lines("token", name, finite.groups, values, groups.chosen(there).counts(), lists)


def merged(rollups: pa.Table) -> pa.Table:
    """Merge roll-ups from several files into one row per level, column, split and step, sorted in this order."""
    lines = rollups.select(ROLLUP_SCHEMA.names).cast(ROLLUP_SCHEMA).sort_by(ORDER).combine_chunks()
    if not lines.num_rows:
        return lines
    new = np.full(lines.num_rows, False)
    for name, _ in ORDER:
        codes = lines[name].combine_chunks().dictionary_encode(null_encoding="encode").indices.to_numpy()
        new |= are_first(codes)
    first, group = np.flatnonzero(new), np.cumsum(new) - 1
    if len(first) == len(new):
        return lines
    content = {name: lines[name].take(first) for name, _ in ORDER}
    with np.errstate(over="ignore"):  # squares of numbers above 1e154
        for name in ("count", "not_finite", "sum", "sum_squares"):
            content[name] = np.add.reduceat(lines[name].to_numpy(), first)
    for name, extreme, absent in (("min", np.minimum, np.inf), ("max", np.maximum, -np.inf)):
        found = extreme.reduceat(pc.fill_null(lines[name], absent).to_numpy(), first)
        content[name] = pa.array(found, mask=np.isinf(found))
    content |= _merged_lists(lines, group, len(first), np.array(content["level"].to_pylist()) == "row")
    return pa.table({field.name: content[field.name] for field in ROLLUP_SCHEMA}, ROLLUP_SCHEMA)


def edges(keys: Array) -> tuple[Array, Array]:
    """Return the lower and upper edge of each bin; bin 0 holds only values near 0, and both its edges are 0."""
    keys = np.asarray(keys, np.int64)
    near, far = _from_bits(np.abs(keys)), _from_bits(np.abs(keys) + 1)
    low, high = np.where(keys < 0, -far, near), np.where(keys < 0, -near, far)
    return np.where(keys == 0, 0.0, low), np.where(keys == 0, 0.0, high)


def quantiles(keys: Array, counts: Array, shares: Sequence[float]) -> Array:
    """Return the midpoint of the bin of each quantile (0 = smallest, 1 = largest); NaN if there are no values."""
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
    return np.where(np.isinf(found), 2.0**128, found)  # the upper edge of the last bin


def _groups(rows: pa.Table) -> tuple[dict[str, list[Any]], Array]:
    """Return the step and split of each group, and [N] the group of each row."""
    split = rows["split"].combine_chunks() if "split" in rows.column_names else pa.nulls(len(rows), pa.string())
    encoded = split.dictionary_encode()
    codes = encoded.indices.fill_null(-1).to_numpy()
    pairs, group = np.unique(np.stack([rows["step"].to_numpy(), codes], axis=1), axis=0, return_inverse=True)
    names = [*encoded.dictionary.to_pylist(), None]  # the last one is that of code −1
    return {"step": pairs[:, 0].tolist(), "split": [names[code] for code in pairs[:, 1]]}, group.reshape(-1)


def _row_values(rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name in _NUMERIC:
        if name in rows.column_names:
            yield name, rows[name].combine_chunks()
    if "ref_reward" in rows.column_names:
        yield "gap", pc.subtract(rows["reward"], rows["ref_reward"]).combine_chunks()
    if "reward_parts" in rows.column_names:
        yield from _parts(rows["reward_parts"].combine_chunks())


def _parts(maps: pa.MapArray) -> Iterator[tuple[str, pa.Array]]:
    """Yield each part of the reward with its value in every row, null in rows that lack it."""
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


def _token_values(tokens: pa.Table) -> Iterator[tuple[str, Array, Array]]:
    found = {name: _numbers(tokens[name]) for name in _SIGNALS if name in tokens.column_names}
    for name, (numbers, there) in found.items():
        yield name, numbers, there
    for name, derived in DERIVED.items():
        if not found.keys() >= set(derived.needs):
            continue
        numbers = derived.of({need: found[need][0] for need in derived.needs})
        # Non-finite numbers are counted only once, in the recorded column that contains them.
        yield name, numbers, np.logical_and.reduce([found[need][1] for need in derived.needs]) & np.isfinite(numbers)


def _numbers(values: pa.Array | pa.ChunkedArray) -> tuple[Array, Array]:
    """Return the values as float64, and which of them are not null."""
    numbers = np.asarray(values.to_numpy(zero_copy_only=False), np.float64) if len(values) else np.zeros(0)
    there = np.asarray(values.is_valid()) if values.null_count else np.full(len(numbers), True)
    return numbers, there


class _Lines(NamedTuple):
    """The roll-ups of one column, one line per group."""

    level: str
    column: str
    numbers: dict[str, Array]
    """[size] columns; min and max are infinite where there are no finite values"""
    lists: Mapping[str, pa.Array]
    """the sketches or the bins"""


def _lines(
    level: str, column: str, finite: _Groups, values: Array, measured: Array, lists: Mapping[str, pa.Array]
) -> _Lines:
    """Return the roll-ups of one column: of its finite values and their groups, and of [size] numbers of all values."""
    count = finite.counts()
    with np.errstate(over="ignore"):
        squares = values**2
    numbers = {
        "count": count,
        "not_finite": measured - count,
        "sum": finite.reduced(np.add, values, 0),
        "sum_squares": finite.reduced(np.add, squares, 0),
        "min": finite.reduced(np.minimum, values, np.inf),
        "max": finite.reduced(np.maximum, values, -np.inf),
    }
    return _Lines(level, column, numbers, lists)


def _table(where: Mapping[str, list[Any]], parts: Sequence[_Lines]) -> pa.Table:
    """Return the roll-ups of all columns, for the groups that have values; ``where`` is the step and split of each."""
    if not parts:
        return ROLLUP_SCHEMA.empty_table()
    size = len(where["step"])
    numbers = {name: np.concatenate([part.numbers[name] for part in parts]) for name in parts[0].numbers}
    content: dict[str, Any] = {name: values * len(parts) for name, values in where.items()}
    content |= {name: [value for part in parts for value in [getattr(part, name)] * size]
                for name in ("level", "column")}  # fmt: skip
    content |= {name: pa.array(values, mask=(numbers["count"] == 0) & (name in ("min", "max")))
                for name, values in numbers.items()}  # fmt: skip
    for field in ROLLUP_SCHEMA:
        if field.name not in content:
            absent = pa.nulls(size, field.type)
            content[field.name] = pa.concat_arrays([part.lists.get(field.name, absent) for part in parts])
    table = pa.table({field.name: pa.array(content[field.name], field.type) for field in ROLLUP_SCHEMA}, ROLLUP_SCHEMA)
    return table.filter(pa.array(numbers["count"] + numbers["not_finite"] > 0))


def _chosen(values: Array, there: Array) -> Array:
    return values if there.all() else values[there]


def _sketch_lists(
    group: Array, keys: Array, counts: Array, size: int, there: Array | None = None
) -> dict[str, pa.Array]:
    """Return the sketches of ``size`` groups; the same key may occur several times in a group."""
    pairs, at = np.unique((group.astype(np.int64) << 16) + keys + (1 << 15), return_inverse=True)
    owner = pairs >> 16
    total = np.bincount(at, counts, minlength=len(pairs)).astype(np.int64)
    found = {"sketch_keys": ((pairs & 0xFFFF) - (1 << 15)).astype(np.int16), "sketch_counts": total}
    return {name: _lists(owner, size, values, there) for name, values in found.items()}


def _merged_lists(lines: pa.Table, group: Array, size: int, is_row: Array) -> dict[str, pa.Array]:
    def flat(name: str) -> Array:
        return np.asarray(lines[name].combine_chunks().flatten())

    def owners(name: str) -> tuple[Array, Array]:
        """Return the group of each list entry, and its index within its list."""
        length = pc.fill_null(pc.list_value_length(lines[name]), 0).to_numpy()
        index = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
        return np.repeat(group, length), index

    keys_group, _ = owners("sketch_keys")
    bins_group, at = owners("bin_counts")
    bins = _Bins(_Groups(bins_group, size), at)
    return {
        **_sketch_lists(keys_group, flat("sketch_keys"), flat("sketch_counts"), size, is_row),
        **bins.lists(bins.sums(flat("bin_counts")), bins.sums(flat("bin_sums")), ~is_row),
    }


def _lists(owner: Array, size: int, values: Array, there: Array | None = None) -> pa.Array:
    """Split the values into ``size`` lists by their owners, which ascend; null where ``there`` is false."""
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=size))])
    mask = None if there is None else pa.array(~there)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values), mask=mask)
