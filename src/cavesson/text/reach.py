"""Columns by name, also those within objects: `reward_model.ground_truth` is that field of the column's object."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def parsed(value: Any) -> Any:
    """Parse JSON contained in a text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):  # no JSON, or too deep for the parser
        return value


def reach(value: Any, path: str) -> list[Any]:
    """Return a list with the value at a path, or an empty list if there is none.

    A name that contains dots comes before fields of that path. An object may be JSON in a text, and a number in a path
    counts the items of a list from 0.
    """
    value = parsed(value)
    if isinstance(value, list):
        head, _, rest = path.partition(".")
        if not head.isdecimal() or int(head) >= len(value):
            return []
        return reach(value[int(head)], rest) if rest else [value[int(head)]]
    if not isinstance(value, Mapping):
        return []
    if path in value:
        return [value[path]]
    words = path.split(".")
    for size in range(len(words) - 1, 0, -1):
        name, rest = ".".join(words[:size]), ".".join(words[size:])
        if name in value and (found := reach(value[name], rest)):
            return found
    return []


def names_in(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of columns, each followed by the paths of the fields in it."""
    for name, value in values.items():
        yield name
        inner = parsed(value)
        if isinstance(inner, Mapping):
            yield from (f"{name}.{path}" for path in names_in(inner))
