"""Import any other table of rollouts, JSON lines or Parquet, with a mapping of its columns to the record's."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from cavesson.errors import UserError
from cavesson.importers.fields import (
    as_number,
    conversation,
    group_of,
    parts_of,
    pick,
    reward_of,
    step_of,
    to_json,
    with_rest,
)
from cavesson.importers.packing import Values, is_text, pack_column, pack_whole
from cavesson.importers.rollout import Broken, Format, ImportedRollout, Origin
from cavesson.importers.samples import samples_of
from cavesson.importers.steps import NUMBER, found_step, step_by_pattern
from cavesson.importers.turns import turns_of
from cavesson.record.former_names import FORMER
from cavesson.record.schema import ROW_COLUMNS, SOURCES, TOKEN_COLUMNS, Column
from cavesson.record.write.statistics import STATISTICS, TURN_STATISTICS

_FILLED_IN = {"attempt", "rank", "sample", "extra", "position", *STATISTICS, *TURN_STATISTICS}
_IN_ROWS = {column.name: column for column in ROW_COLUMNS if column.name not in _FILLED_IN}
_IN_TOKENS = {column.name: column for column in TOKEN_COLUMNS if column.name not in ("step", "sample", "position")}
_IDS = {"prompt": "prompt_ids", "response": "token_id"}
"""A text, and the ids that may be there in its place."""
_PART = "reward_parts."
"""Begins the name of one part of the reward."""


def mapped(columns: Mapping[str, str]) -> Format:
    """Return the format of a table whose columns have other names than those in the record; omitted ones are the same.

    Raises:
        UserError: A name is not a column of the record.
    """
    columns = {FORMER.get(name, name): column for name, column in columns.items()}
    known = _IN_ROWS.keys() | _IN_TOKENS.keys()
    if unknown := {name for name in columns if name not in known and not name.startswith(_PART)}:
        raise UserError(
            f"--map {min(unknown)}=…: the record has no such column; columns are {', '.join(sorted(known))}"
        )
    names = {name: name for name in sorted(known)} | dict(columns)
    return Format(
        "plain",
        "any table of rollouts, .jsonl or .parquet, with --map for its columns",
        ("*.jsonl *.parquet", "*.table.json", "*.db/*/*"),
        tuple(frozenset({names[name].partition(".")[0]}) for name in ("prompt", "response", "reward")),
        partial(_rollouts, names, columns.keys()),
        accepts=partial(_accepts, names),
        one_run=False,
        check=partial(_check, columns),
    )


def _accepts(names: Mapping[str, str], record: Mapping[str, Any]) -> bool:
    return all(_has(record, names[name]) or _has(record, names[_IDS.get(name, name)]) for name in (*_IDS, "reward"))


def _has(record: Mapping[str, Any], name: str) -> bool:
    return name in record or pick(record, name) is not None


def _check(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a mapping of a column that none of the first records has, which is a typing error."""
    missing = {name: column for name, column in columns.items() if NUMBER not in column}
    found: dict[str, None] = {}
    for record in records:
        found |= dict.fromkeys(record)
        missing = {name: column for name, column in missing.items() if not _has(record, column)}
    for name, column in missing.items():
        raise UserError(f"--map {name}={column}: no record has this column; columns are {', '.join(found)}")


def _rollouts(
    names: Mapping[str, str], given: Collection[str], record: dict[str, Any], place: Origin
) -> Iterable[ImportedRollout]:
    lists = [names[name] for name in _IN_TOKENS]
    return [_rollout(names, given, sample, place) for sample in samples_of(record, names["response"], lists)]


def _rollout(
    names: Mapping[str, str], given: Collection[str], record: dict[str, Any], place: Origin
) -> ImportedRollout:
    """Return the rollout of a record; values that do not fit their columns are kept in ``extra``."""
    earlier = {now: name for name, now in FORMER.items() if name in record and names[now] not in record}
    names = {**names, **earlier}
    step, remarks = _step(names["step"], record, place)
    values = {name: value for name, column in names.items() if (value := pick(record, column)) is not None}
    row, tokens = _row(values, names, place), _tokens(values)
    for name, ids in _IDS.items():
        if name not in row and ids not in row.keys() | tokens.keys():
            raise Broken(f"{names[name]!r} is missing, expected a text; --map {name}=COLUMN names another column")
    scores = {names["reward"]: values.get("reward")} if _has(record, names["reward"]) else {}
    row["reward"] = reward_of(scores, names["reward"])
    row.setdefault("group", group_of(row["prompt"] if "prompt" in row else to_json(row["prompt_ids"])))
    kept = {name for name in values if name in ("step", *tokens) or _is_kept(name, values, row, tokens)}
    for name in given:
        if name in values and name not in (*kept, "reward", "group"):
            remarks += (f"{names[name]!r} does not fit {name} and is kept in extra",)
    if isinstance(values.get("reward"), list):
        remarks += (f"{names['reward']!r} has one number per token, and the reward is their sum",)
    real = max((packed.size for packed in tokens.values()), default=0)
    used = [names[name] for name in kept]
    turns = turns_of(values.get("response"))
    return ImportedRollout(step, with_rest(row, record, used, place), tokens, real, remarks, turns)


def _step(column: str, record: Mapping[str, Any], place: Origin) -> tuple[int, tuple[str, ...]]:
    if column == "step":
        return found_step(record, place)
    if NUMBER in column:
        return step_by_pattern(column, place.names), ()
    return step_of({column: pick(record, column)}, column), ()


def _row(values: Mapping[str, Any], names: Mapping[str, str], place: Origin) -> dict[str, Any]:
    columns = [column for name, column in _IN_ROWS.items() if name in values and name != "step"]
    row = {column.name: _row_value(column, values[column.name], names[column.name], place) for column in columns}
    row = {name: value for name, value in row.items() if value is not None}
    parts = {name.removeprefix(_PART): as_number(value) for name, value in values.items() if name.startswith(_PART)}
    if parts := {name: value for name, value in parts.items() if value is not None}:
        row["reward_parts"] = row.get("reward_parts", {}) | parts
    return row


def _row_value(column: Column, value: Any, key: str, place: Origin) -> Any:
    """Return the value in the form that the column stores; None if it does not fit."""
    if column.name in ("prompt", "response", "ref_response"):
        return conversation(value, key)
    if column.name == "ground_truth" and not isinstance(value, str):
        return to_json(value)
    if column.name == "group" and is_text(value):
        return group_of(value)
    if pa.types.is_map(column.type):
        return _map(column, value, place) if isinstance(value, Mapping) else None
    if pa.types.is_floating(column.type):
        return as_number(value)
    if pa.types.is_list(column.type):
        return value if pack_whole(value, low=0) is not None else None
    fits = is_text(value) if pa.types.is_string(column.type) else pack_whole([value], *_BOUNDS[column.type]) is not None
    return value if fits else None


def _map(column: Column, value: Mapping[str, Any], place: Origin) -> dict[str, Any] | None:
    """Return the entries of an object that fit, if any."""
    if pa.types.is_floating(column.type.item_type):
        return parts_of(value, place) or None
    return {name: text for name, text in value.items() if is_text(name) and is_text(text)} or None


_BOUNDS = {pa.int32(): (-(2**31), 2**31 - 1), pa.int64(): (-(2**63), 2**63 - 1)}


def _tokens(values: Mapping[str, Any]) -> dict[str, Values]:
    """Return the columns of tokens; a list in the place of the reward is one if it has a number for each token."""
    packed = {name: pack_column(column.type, values.get(name)) for name, column in _IN_TOKENS.items()}
    if not {*SOURCES, None}.issuperset(values["source"] if packed["source"] is not None else ()):
        packed["source"] = None
    tokens = {name: value for name, value in packed.items() if value is not None}
    scores = pack_column(_IN_TOKENS["token_reward"].type, values.get("reward"))
    if scores is not None and "token_reward" not in tokens and scores.size in {value.size for value in tokens.values()}:
        tokens["token_reward"] = scores
    return tokens


def _is_kept(name: str, values: Mapping[str, Any], row: Mapping[str, Any], tokens: Mapping[str, Values]) -> bool:
    """Whether a column of the record represents a value, so that it need not be in ``extra`` as well."""
    value = values[name]
    if name == "reward" and isinstance(value, list):
        return "token_reward" in tokens and "token_reward" not in values
    if isinstance(value, Mapping) and isinstance(row.get(name), dict):
        return bool(value.keys() <= row[name].keys())
    if name.startswith(_PART):
        return name.removeprefix(_PART) in row.get("reward_parts", ())
    return name in row and (name != "group" or not isinstance(value, str))


FORMAT = mapped({})
