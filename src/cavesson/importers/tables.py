"""Convert many rollouts into the two tables of a segment, column by column."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from cavesson.importers.packing import PackedNumbers, PackedTexts, Values
from cavesson.importers.rollout import ImportedRollout
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS, TURN_COLUMNS, Column, arrow_schema
from cavesson.record.tables import NO_TURNS, Tables
from cavesson.record.write.statistics import NEEDS, rollout_statistics, turn_statistics

Array = np.ndarray[Any, np.dtype[Any]]


def tables_of(rollouts: Sequence[ImportedRollout], samples: Sequence[int]) -> Tables:
    """Return the rows and the tokens of ``rollouts``, in their order; ``samples`` are their numbers in their steps."""
    sizes = np.array([max((v.size for v in r.tokens.values()), default=0) for r in rollouts], np.int64)
    index = np.repeat(np.arange(len(rollouts)), sizes)
    position = np.arange(len(index)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    real = np.array([r.real for r in rollouts], np.int64)
    learned = position < real[index]
    flat: dict[str, pa.Array] = {}
    given = set().union(*(r.tokens for r in rollouts))
    for column in TOKEN_COLUMNS:
        if column.name in given:
            flat[column.name] = _flat([r.tokens.get(column.name) for r in rollouts], sizes, column)
    if "learned" in flat:
        lacks = np.array(["learned" not in r.tokens for r in rollouts])  # all of these tokens were trained on
        learned &= lacks[index] | flat["learned"].to_numpy(zero_copy_only=False).astype(bool)
    statistics = _statistics(index, learned, flat, sizes)
    step = np.array([r.step for r in rollouts], np.int32)
    sample = np.asarray(samples, np.int32)
    flat |= {name: pa.array(np.repeat(keys, sizes)) for name, keys in (("step", step), ("sample", sample))}
    flat["learned"] = pa.array(learned)
    flat["position"] = pa.array(position.astype(np.int32))
    turns = _turns(rollouts, step, sample)
    if len(turns):
        statistics |= turn_statistics(pa.table({"step": step, "sample": sample}), turns)
    rows = _table(ROW_COLUMNS, _rows(rollouts, step, sample) | statistics)
    return Tables(rows, _table(TOKEN_COLUMNS, flat), turns)


def _turns(rollouts: Sequence[ImportedRollout], step: Array, sample: Array) -> pa.Table:
    """Return the turns of ``rollouts``, in their order."""
    places = zip(rollouts, step.tolist(), sample.tolist(), strict=True)
    lines = [
        {"step": at, "attempt": 0, "sample": number, "turn": turn, **columns}
        for rollout, at, number in places
        for turn, columns in enumerate(rollout.turns)
    ]
    return pa.Table.from_pylist(lines, arrow_schema(TURN_COLUMNS)) if lines else NO_TURNS


def _rows(rollouts: Sequence[ImportedRollout], step: Array, sample: Array) -> dict[str, pa.Array]:
    content = {"step": pa.array(step), "sample": pa.array(sample)}
    content["attempt"] = pa.array(np.zeros(len(rollouts), np.int16))
    names = set().union(*(r.row for r in rollouts))
    for column in ROW_COLUMNS:
        if column.name in names:
            values = [r.row.get(column.name) for r in rollouts]
            if pa.types.is_map(column.type):
                values = [None if v is None else list(v.items()) for v in values]
            content[column.name] = pa.array(values, column.type)
    return content


def _flat(found: Sequence[Values | None], sizes: Array, column: Column) -> pa.Array:
    """Return one token column of all rollouts; null for missing values."""
    counts = np.array([0 if values is None else values.size for values in found], np.int64)
    starts = np.cumsum(sizes) - sizes
    place: Array | slice = slice(None)
    missing = np.zeros(sizes.sum(), np.bool_)
    if not np.array_equal(counts, sizes):
        begin = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        place = begin + np.arange(len(begin))
        missing[:] = True
        missing[place] = False
    for offset, values in zip(starts.tolist(), found, strict=True):
        if values is not None and values.missing:
            missing[offset + np.array(values.missing)] = True
    if pa.types.is_string(column.type):
        return _texts([v for v in found if isinstance(v, PackedTexts)], missing, place)
    content = np.frombuffer(b"".join([v.content for v in found if isinstance(v, PackedNumbers)]))
    if len(content) < len(missing):
        given, content = content, np.zeros(len(missing))
        content[place] = given
    return _numbers(content, missing, column.type)


def _numbers(content: Array, missing: Array, type_: pa.DataType) -> pa.Array:
    nulls = missing if missing.any() else None
    if type_ == pa.float32():
        with np.errstate(over="ignore"):
            narrow = content.astype(np.float32)
        fits = bool((narrow == content).all()) or np.array_equal(narrow, content, equal_nan=True)
        return pa.array(narrow if fits else content, mask=nulls)
    return pa.array(np.where(missing, 0, content).astype(type_.to_pandas_dtype()), type_, mask=nulls)


def _texts(found: Sequence[PackedTexts], missing: Array, place: Array | slice) -> pa.Array:
    """Return a string array of joined texts: offsets in characters come from Python, offsets in bytes from numpy."""
    joined = "".join([texts.content for texts in found])
    content = joined.encode()
    lengths = np.zeros(len(missing) + 1, np.int64)
    lengths[1:][place] = np.fromiter(chain.from_iterable([texts.lengths for texts in found]), np.int64)
    characters = np.cumsum(lengths)
    if len(content) > len(joined):
        data = np.frombuffer(content + b" ", np.int8)  # one extra character, which begins where the last one ends
        characters = np.flatnonzero(data >= -64)[characters]  # smaller values are continuation bytes of a character
    offsets = characters.astype(np.int32)
    nulls = pa.array(~missing).buffers()[1] if missing.any() else None
    buffers = [nulls, pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(missing), buffers)


def _statistics(index: Array, learned: Array, flat: Mapping[str, pa.Array], sizes: Array) -> dict[str, pa.Array]:
    """Return the statistics of the rows, each null for rollouts that lack one of the values in ``NEEDS``."""
    count = len(sizes)
    chosen = slice(None) if learned.all() else learned
    real = index[chosen]
    columns, lacking = {}, {}
    for name in {name for names in NEEDS.values() for name in names}:
        values = flat.get(name, flat.get("token") if name == "token_id" else None)
        if values is not None:
            columns[name] = _as_numbers(values)[chosen]
            lacking[name] = np.full(count, False)
            if values.null_count:
                lacking[name][real[values.is_null().to_numpy(zero_copy_only=False)[chosen]]] = True
    result = {}
    for name, statistic in rollout_statistics(real, count, columns).items():
        null = np.logical_or.reduce([lacking[needed] for needed in NEEDS.get(name, ())] or [sizes == 0])
        null |= statistic.is_null().to_numpy(zero_copy_only=False) | (sizes == 0)
        result[name] = pa.array(statistic.to_numpy(zero_copy_only=False), statistic.type, mask=null)
    return result


def _as_numbers(values: pa.Array) -> Array:
    """Return numbers unchanged, and token texts as one integer per distinct text."""
    if pa.types.is_string(values.type):
        values = values.dictionary_encode().indices
    filled: Array = values.fill_null(0).to_numpy() if pa.types.is_integer(values.type) else values.to_numpy(False)
    return filled


def _table(columns: Sequence[Column], content: Mapping[str, pa.Array]) -> pa.Table:
    present = [column for column in columns if column.name in content]
    fields = arrow_schema(present)
    arrays = [content[column.name] for column in present]
    return pa.Table.from_arrays(
        arrays, schema=pa.schema([f.with_type(a.type) for f, a in zip(fields, arrays, strict=True)])
    )
