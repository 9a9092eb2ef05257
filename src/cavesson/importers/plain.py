"""Import any other table of rollouts, JSON lines or Parquet, with a mapping of its columns to the record's."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from cavesson.errors import UserError
from cavesson.importers.fields import conversation, group_of, number_of, step_of, to_json, with_rest
from cavesson.importers.packing import is_number, is_text, pack_column, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS, Column
from cavesson.record.statistics import STATISTICS

_FILLED_IN = {"attempt", "rank", "sample", "extra", "position", *STATISTICS}
_IN_ROWS = {column.name: column for column in ROW_COLUMNS if column.name not in _FILLED_IN}
_IN_TOKENS = {column.name: column for column in TOKEN_COLUMNS if column.name not in ("step", "sample", "position")}


def mapped(columns: Mapping[str, str]) -> Format:
    """Return the format of a table whose columns have other names.

    Args:
        columns: Name in the record → name in the table. Omitted names are the same in both.

    Raises:
        UserError: A name is not a column of the record.
    """
    known = _IN_ROWS.keys() | _IN_TOKENS.keys()
    if unknown := columns.keys() - known:
        raise UserError(
            f"--map {min(unknown)}=…: the record has no such column; columns are {', '.join(sorted(known))}"
        )
    names = {name: columns.get(name, name) for name in sorted(known)}
    return Format(
        "plain",
        "any table of rollouts, .jsonl or .parquet, with --map for its columns",
        ("*.jsonl", "*.parquet", "**/*.jsonl", "**/*.parquet"),
        partial(_recognises, names),
        partial(_rollouts, names),
    )


def _recognises(names: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    return {names[name] for name in ("prompt", "response", "reward")} <= record.keys()


def _rollouts(names: Mapping[str, str], record: dict[str, Any], place: Origin) -> Iterable[ImportedRollout]:
    """Return the rollout of a record; its step defaults to 0, and row values that do not fit are kept in ``extra``."""
    used = {names["step"]}
    step = step_of(record, names["step"]) if record.get(names["step"]) is not None else 0
    row: dict[str, Any] = {}
    for name, column in _IN_ROWS.items():
        if name != "step" and (value := record.get(names[name])) is not None:
            fitting = _row_value(column, value, names[name])
            if fitting is not None:
                row[name] = fitting
                used.add(names[name])
    for name in ("prompt", "response"):
        if name not in row:
            raise Broken(f"{names[name]!r} is missing, expected a text; --map {name}=COLUMN names another column")
    row["reward"] = number_of(record, names["reward"])
    row.setdefault("group", group_of(row["prompt"]))
    tokens = {}
    for name, column in _IN_TOKENS.items():
        if (values := pack_column(column.type, record.get(names[name]))) is not None:
            tokens[name] = values
            used.add(names[name])
    real = max((values.size for values in tokens.values()), default=0)
    return [ImportedRollout(step, with_rest(row, record, used, place), tokens, real)]


def _row_value(column: Column, value: Any, key: str) -> Any:
    """Return the value in the form that the column stores; None if it does not fit."""
    if column.name in ("prompt", "response", "ref_response"):
        return conversation(value, key)
    if column.name == "ground_truth" and not isinstance(value, str):
        return to_json(value)
    for fits, check in _CHECKS.items():
        if fits(column.type):
            return value if check(value) else None
    return None


def _is_parts(value: Any) -> bool:
    return isinstance(value, dict) and all(is_text(k) and (v is None or is_number(v)) for k, v in value.items())


_CHECKS: dict[Callable[[pa.DataType], bool], Callable[[Any], bool]] = {
    pa.types.is_string: is_text,
    pa.types.is_floating: is_number,
    pa.types.is_int64: lambda value: type(value) is int and -(2**63) <= value < 2**63,
    pa.types.is_int32: lambda value: type(value) is int and -(2**31) <= value < 2**31,
    pa.types.is_list: lambda value: pack_whole(value, low=0) is not None,
    pa.types.is_map: _is_parts,
}


FORMAT = mapped({})
