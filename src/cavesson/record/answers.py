"""An answer to a query as text that programs read."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cavesson.errors import UserError
from cavesson.text.quoting import quoted

if TYPE_CHECKING:
    from cavesson.record.query import Answer


def to_csv(answer: "Answer") -> str:
    """Return CSV with a line of names; texts are in quotes, null is nothing, lists and maps are JSON."""
    lines = [",".join(map(quoted, answer.columns)), *(",".join(map(_cell, row)) for row in _rows(answer))]
    return "".join(f"{line}\n" for line in lines)


def to_json(answer: "Answer") -> str:
    """Return a JSON array with an object per line; what JSON has no value for, such as a date, is its text.

    Raises:
        UserError: two columns have one name.
    """
    double = next((name for name in answer.columns if answer.columns.count(name) > 1), None)
    if double is not None:
        raise UserError(f"two columns are called {double!r}; name one of them otherwise: … AS other")
    lines = [
        json.dumps(dict(zip(answer.columns, row, strict=True)), default=str, ensure_ascii=False)
        for row in _rows(answer)
    ]
    return "[" + ",\n ".join(lines) + "]\n"


def _rows(answer: "Answer") -> Iterator[list[Any]]:
    """The rows, in which maps from texts, such as the parts of a reward, are objects and not lists of pairs."""
    maps = [kind.startswith("map<string,") for kind in answer.types]
    for row in answer.rows:
        yield [dict(value) if is_map and value is not None else value for value, is_map in zip(row, maps, strict=True)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return quoted(json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, list | dict) else str(value))
