"""Write what a recorder was given: calls become tables, and tables the files of one segment."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.record.former_names import current
from cavesson.record.keys import rollout_keys
from cavesson.record.maintain.merging import in_order
from cavesson.record.precision import Array, rounded
from cavesson.record.rollups import rollups_of
from cavesson.record.schema import (
    ROW_COLUMNS,
    SOURCE_CODES,
    SOURCES,
    STEP_COLUMNS,
    TOKEN_COLUMNS,
    TURN_COLUMNS,
    Column,
    arrow_schema,
)
from cavesson.record.segments import file_name, is_compacted, segment_name, stem_of, write_parquet
from cavesson.record.storage import Location, Storage, small_table, storage
from cavesson.record.tables import NO_TURNS, Tables, together
from cavesson.record.write.statistics import rollout_statistics, turn_statistics

OF_SAMPLER = ("sampler_logprob", "sampler_version")
"""Columns of the sampler that drew a token."""
PRECISIONS = {column.name: column.precision for column in TOKEN_COLUMNS if column.precision is not None}


class Rollouts(NamedTuple):
    """One call with rollouts of a step."""

    step: int
    rows: dict[str, Any]
    """[B] columns"""
    tokens: dict[str, Array]
    """[N] columns of the response tokens, ``row`` (index of the rollout in ``rows``) and ``position``; ``source`` as
    code"""
    measured: bool
    """whether there are token columns; without them, even the number of tokens is unknown"""
    turns: dict[str, list[Any]]
    """[M] columns of the turns; empty if there are none"""


class Metrics(NamedTuple):
    """One call with metrics of a step."""

    step: int
    values: dict[str, float]


Call = Rollouts | Metrics
Rows = dict[int, dict[str, float]]
"""Step → metrics."""


def flattened(
    step: int, rows: Mapping[str, Any], tokens: Mapping[str, Array], measured: bool, turns: Mapping[str, list[Any]]
) -> Rollouts:
    """Return a call without padding, on either side; ``tokens`` are [B, T] columns, with ``attended``."""
    order = np.argsort(np.asarray(rows["sample"]))
    attended = tokens["attended"][order]
    index, column = np.nonzero(attended)
    position = column - attended.argmax(axis=1)[index] if attended.size else column
    index = order[index]
    flat = {name: array[index, column] for name, array in tokens.items() if name != "attended"}
    return Rollouts(step, dict(rows), flat | {"row": index, "position": position}, measured, dict(turns))


def tables_of(calls: Sequence[Rollouts], attempt: int, rank: int, failed: Callable[[Exception], None]) -> Tables | None:
    """Return the tables of several calls with rollouts; None if there are none.

    ``failed`` is called with the exception of each call that cannot be written; the other calls are not affected.
    """
    try:
        return _tables_of(calls, attempt, rank) if calls else None
    except Exception as error:
        if len(calls) == 1:
            failed(error)
            return None
    each = [found for call in calls if (found := tables_of([call], attempt, rank, failed)) is not None]
    return together(each) if each else None


def _tables_of(calls: Sequence[Rollouts], attempt: int, rank: int) -> Tables:
    alike: dict[Any, list[Rollouts]] = {}
    for call in calls:
        alike.setdefault((tuple(call.rows), tuple(call.tokens), call.measured, tuple(call.turns)), []).append(call)
    return together([_tables_of_alike(some, attempt, rank) for some in alike.values()])


def _tables_of_alike(calls: Sequence[Rollouts], attempt: int, rank: int) -> Tables:
    """Return the tables of calls with the same columns, which takes little longer than those of one call."""
    sizes = [len(call.rows["sample"]) for call in calls]
    rows = {name: _joined([call.rows[name] for call in calls]) for name in calls[0].rows}
    flat = {name: np.concatenate([call.tokens[name] for call in calls]) for name in calls[0].tokens}
    count, step = sum(sizes), np.repeat([call.step for call in calls], sizes)
    index = flat.pop("row") + np.repeat(np.cumsum([0, *sizes[:-1]]), [len(call.tokens["row"]) for call in calls])
    if calls[0].measured:
        rows |= _statistics(index, count, flat)
    rows |= {"step": step, "attempt": np.full(count, attempt), "rank": np.full(count, rank)}
    # The statistics above are computed from the exact numbers, before rounding.
    flat |= {name: rounded(flat[name], precision) for name, precision in PRECISIONS.items() if name in flat}
    flat = {name: _null_if_unmeasured(name, values, flat) for name, values in flat.items()}
    flat |= {"source": _source_names(flat["source"])} if "source" in flat else {}
    flat |= {"step": step[index], "sample": np.asarray(rows["sample"])[index]}
    turns = _turns_of(calls, attempt, rank)
    if len(turns):
        rows |= turn_statistics(pa.table({name: rows[name] for name in ("step", "sample")}), turns)
    return Tables(table_of(ROW_COLUMNS, rows), table_of(TOKEN_COLUMNS, flat), turns)


def _statistics(index: Array, count: int, flat: Mapping[str, Array]) -> dict[str, pa.Array]:
    """Return the statistics of the rows, which are those of the learned tokens."""
    learned = flat.get("learned")
    if learned is None or learned.all():
        return rollout_statistics(index, count, flat)
    return rollout_statistics(index[learned], count, {name: values[learned] for name, values in flat.items()})


def _null_if_unmeasured(name: str, values: Any, flat: Mapping[str, Array]) -> Any:
    """Return a column with null where nothing was measured: instead of NaN at tokens that were not learned, and of the
    sampler's columns at tokens of the data, which no sampler has drawn.
    """
    if not isinstance(values, np.ndarray):
        return values
    unknown = np.zeros(len(values), np.bool_)
    if "learned" in flat and values.dtype.kind == "f":
        unknown |= np.isnan(values) & ~flat["learned"].astype(bool)
    if "source" in flat and name in OF_SAMPLER:
        unknown |= flat["source"] == SOURCE_CODES["data"]
    return pa.array(values, mask=unknown) if unknown.any() else values


def _source_names(codes: Array) -> pa.Array:
    """Return the sources as names; null for code −1."""
    found = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int8(), mask=codes < 0), pa.array(SOURCES))
    return found.cast(pa.string())


def _turns_of(calls: Sequence[Rollouts], attempt: int, rank: int) -> pa.Table:
    """Return the turns of calls with the same columns."""
    turns = {name: list(chain.from_iterable(call.turns[name] for call in calls)) for name in calls[0].turns}
    if not turns:
        return NO_TURNS
    sizes = [len(call.turns["sample"]) for call in calls]
    step = np.repeat([call.step for call in calls], sizes)
    places = {"step": step, "attempt": np.full(len(step), attempt), "rank": np.full(len(step), rank)}
    return table_of(TURN_COLUMNS, turns | places)


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return list(chain.from_iterable(parts))


def metrics_by_step(calls: Iterable[Metrics]) -> Rows:
    rows: Rows = {}
    for call in calls:
        rows.setdefault(call.step, {}).update({name: float(value) for name, value in call.values.items()})
    return rows


def write_segment(location: Location, attempt: int, rank: int, tables: Tables) -> str:
    """Write one process's rollouts of consecutive steps, and return the name of the file of rows.

    If there is a segment of the same steps, the rollouts are added to it. Those that are there already are replaced, so
    that a write whose outcome is unknown can be repeated.

    The rows file is written last and commits the rollouts: tokens and turns without a row do not count.

    Raises:
        ValueError: The segment has been compacted; ``write_rollouts`` can add to any step.
    """
    files, steps = storage(location), tables.rows["step"].to_numpy()
    first, last = int(steps.min()), int(steps.max())
    row_name = segment_name("rows", first, attempt, rank, last)
    stem = stem_of(row_name)
    if files.exists(row_name):
        tables = together([read_segment(files, stem).without(rollout_keys(tables.rows)), tables])
    elif is_compacted(files, row_name):
        raise ValueError(f"step {first} of attempt {attempt} and rank {rank} is compacted: nothing can be added to it")
    tables = in_order(tables)
    write_parquet(files, file_name("tokens", stem), tables.tokens)
    if len(tables.turns):
        write_parquet(files, file_name("turns", stem), tables.turns)
    write_parquet(files, file_name("rollups", stem), rollups_of(tables.rows, tables.tokens))
    write_parquet(files, row_name, tables.rows)
    return row_name


def read_segment(files: Storage, stem: str) -> Tables:
    """Read a small segment in one piece."""
    rows, tokens = (small_table(files, file_name(kind, stem)) for kind in ("rows", "tokens"))
    turns = small_table(files, file_name("turns", stem)) if "turn_count" in rows.column_names else NO_TURNS
    return Tables(rows, current(tokens), turns)


def write_metrics(files: Storage, attempt: int, rank: int, rows: Rows) -> str:
    """Write the metrics of consecutive steps, and return the name of the file."""
    name = segment_name("steps", min(rows), attempt, rank, max(rows))
    content: dict[str, list[Any]] = {"step": list(rows), "attempt": [attempt] * len(rows)}
    names = dict.fromkeys(chain.from_iterable(rows.values()))
    content |= {name: [values.get(name) for values in rows.values()] for name in names}
    columns = [*STEP_COLUMNS, *(Column(name, pa.float64(), "") for name in names)]
    write_parquet(files, name, table_of(columns, content))
    return name


def table_of(columns: Sequence[Column], content: Mapping[str, Any]) -> pa.Table:
    """Return a table of the ``columns`` in ``content``; a float32 column becomes float64 if a value needs it."""
    present = [column for column in columns if column.name in content]
    arrays = [_array(content[column.name], column.type) for column in present]
    fields = [field.with_type(array.type) for field, array in zip(arrow_schema(present), arrays, strict=True)]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _array(values: Any, type_: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array) and type_ != pa.float32():
        return values.cast(type_)
    if pa.types.is_map(type_):
        read = _encodable if pa.types.is_string(type_.item_type) else float
        values = [None if v is None else [(key, read(x)) for key, x in v.items()] for v in values]
    if type_ == pa.float32():
        wide = values.cast(pa.float64()) if isinstance(values, pa.Array) else pa.array(values, pa.float64())
        return wide if _needs_float64(wide) else wide.cast(pa.float32())
    try:
        return pa.array(values, type_)
    except UnicodeEncodeError:
        # A lone surrogate, which UTF-8 cannot encode, is written as its escape.
        return pa.array([v if v is None else _encodable(v) for v in values], type_)


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _needs_float64(wide: pa.Array) -> bool:
    values = wide.to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        return not np.array_equal(values.astype(np.float32).astype(np.float64), values, equal_nan=True)
