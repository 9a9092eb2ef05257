"""Columns of numbers that are written as texts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cavesson.importers.fields import as_number


def numeric_columns(records: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of columns, also of those in objects and lists, whose texts are all numbers."""
    numbers: set[str] = set()
    others: set[str] = set()
    for record in records:
        for name, text in _texts(record):
            (others if as_number(text) is None else numbers).add(name)
    return frozenset(numbers - others)


def _texts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, str):
                yield name, inner
            elif inner is value and isinstance(value, Mapping):
                yield from ((key, text) for key, text in value.items() if isinstance(text, str))
