"""Write what a recorder was given: calls become tables, and tables the files of one segment."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.record.keys import rollout_keys
from cavesson.record.merging import in_order
from cavesson.record.precision import Array, rounded
from cavesson.record.rollups import rollups_of
from cavesson.record.schema import ROW_COLUMNS, STEP_COLUMNS, TOKEN_COLUMNS, Column, arrow_schema
from cavesson.record.segments import is_compacted, segment_name, union, write_parquet
from cavesson.record.statistics import rollout_statistics
from cavesson.record.storage import Location, Storage, small_table, storage

PRECISIONS = {column.name: column.precision for column in TOKEN_COLUMNS if column.precision is not None}


class Rollouts(NamedTuple):
    """One call with rollouts of a step."""

    step: int
    rows: dict[str, Any]
    """[B] columns"""
    tokens: dict[str, Array]
    """[N] columns of the response tokens, ``row`` (index of the rollout in ``rows``) and ``position``"""
    measured: bool
    """whether there are token columns; without them, even the number of tokens is unknown"""


class Metrics(NamedTuple):
    """One call with metrics of a step."""

    step: int
    values: dict[str, float]


Call = Rollouts | Metrics
Tables = tuple[pa.Table, pa.Table]
"""Rows and tokens."""
Rows = dict[int, dict[str, float]]
"""Step → metrics."""


def flattened(step: int, rows: Mapping[str, Any], tokens: Mapping[str, Array], measured: bool) -> Rollouts:
    """Return a call without padding; ``tokens`` are [B, T] columns with their ``mask``."""
    order = np.argsort(np.asarray(rows["sample"]))
    index, position = np.nonzero(tokens["mask"][order])
    index = order[index]
    flat = {name: array[index, position] for name, array in tokens.items()}
    return Rollouts(step, dict(rows), flat | {"row": index, "position": position}, measured)


def tables_of(calls: Sequence[Rollouts], attempt: int, rank: int, failed: Callable[[Exception], None]) -> Tables | None:
    """Return the tables of several calls; None if there are none.

    Args:
        calls: Calls with rollouts.
        attempt: Number of the attempt.
        rank: Rank of the process.
        failed: Called with the exception of each call that cannot be written; the other calls are not affected.
    """
    try:
        return _tables_of(calls, attempt, rank) if calls else None
    except Exception as error:
        if len(calls) == 1:
            failed(error)
            return None
    each = [found for call in calls if (found := tables_of([call], attempt, rank, failed)) is not None]
    return (union(*(rows for rows, _ in each)), union(*(tokens for _, tokens in each))) if each else None


def _tables_of(calls: Sequence[Rollouts], attempt: int, rank: int) -> Tables:
    alike: dict[Any, list[Rollouts]] = {}
    for call in calls:
        alike.setdefault((tuple(call.rows), tuple(call.tokens), call.measured), []).append(call)
    found = [_tables_of_alike(some, attempt, rank) for some in alike.values()]
    return union(*(rows for rows, _ in found)), union(*(tokens for _, tokens in found))


def _tables_of_alike(calls: Sequence[Rollouts], attempt: int, rank: int) -> Tables:
    """Return the tables of calls with the same columns, which takes little longer than those of one call."""
    sizes = [len(call.rows["sample"]) for call in calls]
    rows = {name: _joined([call.rows[name] for call in calls]) for name in calls[0].rows}
    flat = {name: np.concatenate([call.tokens[name] for call in calls]) for name in calls[0].tokens}
    count, step = sum(sizes), np.repeat([call.step for call in calls], sizes)
    index = flat.pop("row") + np.repeat(np.cumsum([0, *sizes[:-1]]), [len(call.tokens["row"]) for call in calls])
    if calls[0].measured:
        rows |= rollout_statistics(index, count, flat)
    rows |= {"step": step, "attempt": np.full(count, attempt), "rank": np.full(count, rank)}
    # The statistics above are computed from the exact numbers, before rounding.
    flat |= {name: rounded(flat[name], precision) for name, precision in PRECISIONS.items() if name in flat}
    flat |= {"step": step[index], "sample": np.asarray(rows["sample"])[index]}
    return table_of(ROW_COLUMNS, rows), table_of(TOKEN_COLUMNS, flat)


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


def write_segment(place: Location, attempt: int, rank: int, rows: pa.Table, tokens: pa.Table) -> str:
    """Write one process's rollouts of consecutive steps, and return the name of the file of rows.

    If there is a segment of the same steps, the rollouts are added to it. Those that are there already are replaced, so
    that a write whose outcome is unknown can be repeated.

    The rows file is written last and commits the rollouts: tokens without a row do not count.

    Raises:
        ValueError: The segment has been compacted; ``write_rollouts`` can add to any step.
    """
    files, steps = storage(place), rows["step"].to_numpy()
    first, last = int(steps.min()), int(steps.max())
    row_name, token_name, rollup_name = (
        segment_name(kind, first, attempt, rank, last) for kind in ("rows", "tokens", "rollups")
    )
    if files.exists(row_name):
        tokens = union(without_rollouts(small_table(files, token_name), rows), tokens)
        rows = union(without_rollouts(small_table(files, row_name), rows), rows)
    elif is_compacted(files, row_name):
        raise ValueError(f"step {first} of attempt {attempt} and rank {rank} is compacted: nothing can be added to it")
    rows, tokens = in_order(rows, tokens)
    write_parquet(files, token_name, tokens)
    write_parquet(files, rollup_name, rollups_of(rows, tokens))
    write_parquet(files, row_name, rows)
    return row_name


def without_rollouts(table: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the lines of rollouts that are not among ``rows``."""
    return table.filter(pa.array(~np.isin(rollout_keys(table), rollout_keys(rows))))


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
    if isinstance(values, pa.Array):
        return values.cast(type_)
    if pa.types.is_map(type_):
        read = _encodable if pa.types.is_string(type_.item_type) else float
        values = [None if v is None else [(key, read(x)) for key, x in v.items()] for v in values]
    if type_ == pa.float32():
        wide = pa.array(values, pa.float64())
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
