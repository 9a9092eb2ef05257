"""Convert the answer to a query to CSV or JSON."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cavesson.errors import UserError
from cavesson.text.quoting import quoted

if TYPE_CHECKING:
    from cavesson.record.read.query import Answer


def to_csv(answer: "Answer") -> str:
    """Return CSV with a header line; strings are quoted, null is empty, lists and maps are JSON."""
    lines = [",".join(map(quoted, answer.columns)), *(",".join(map(_cell, row)) for row in lines_of(answer))]
    return "".join(f"{line}\n" for line in lines)


def to_json(answer: "Answer") -> str:
    """Return a JSON array with one object per line; values without a JSON type, such as dates, become strings.

    Raises:
        UserError: Two columns have the same name.
    """
    double = next((name for name in answer.columns if answer.columns.count(name) > 1), None)
    if double is not None:
        raise UserError(f"two columns are called {double!r}; rename one of them: … AS other")
    lines = [
        json.dumps(dict(zip(answer.columns, row, strict=True)), default=str, ensure_ascii=False)
        for row in lines_of(answer)
    ]
    return "[" + ",\n ".join(lines) + "]\n"


def lines_of(answer: "Answer") -> Iterator[list[Any]]:
    """Yield the lines with string-keyed maps, such as the parts of a reward, as dictionaries, not lists of pairs."""
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
