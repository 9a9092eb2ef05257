"""Counts with singular and plural nouns, and lists that name the first few."""

from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps", "0 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some_of(names: Iterable[str], most: int = 5) -> str:
    """Return the first names in a list, and ``…`` if there are more."""
    first = [*names]
    return ", ".join([*first[:most], *["…"][: len(first) > most]])
