"""Remarks about rows that were dropped, skipped or looked odd while reading, with counts and the first place."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Remark(NamedTuple):
    rows: int
    first: str
    latest: str


class Notes:
    """Remarks, each with the number of rows it applies to."""

    def __init__(self) -> None:
        self._made: dict[str, _Remark] = {}

    def add(self, remark: str, place: str) -> None:
        """Add a remark about the row at a place; a repetition about the same row is not counted."""
        made = self._made.get(remark, _Remark(0, place, ""))
        if made.latest != place:
            self._made[remark] = made._replace(rows=made.rows + 1, latest=place)

    def add_all(self, remarks: Iterable[str], place: str) -> None:
        """Add several remarks about the row at a place."""
        for remark in remarks:
            self.add(remark, place)

    def lines(self) -> list[str]:
        """Return one line per remark, e.g. `3 × turns after the last answer are dropped (first: a.jsonl line 7)`."""
        return [f"{made.rows} × {remark} (first: {made.first})" for remark, made in self._made.items()]


class Reiterable(Generic[T]):
    """An iterable that reads its items again in every iteration, with notes about them, which `read` adds."""

    def __init__(self, read: Callable[[Notes], Iterator[T]]):
        self._read = read
        self._notes = Notes()
        self._is_whole = False

    def __iter__(self) -> Iterator[T]:
        notes = Notes()
        if not self._is_whole:
            self._notes = notes
        yield from self._read(notes)
        self._is_whole = True

    def notes(self) -> list[str]:
        """Return the remarks of a complete reading; before the first one, those of the latest reading so far."""
        return self._notes.lines()
