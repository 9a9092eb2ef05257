"""What was dropped, skipped or looked odd while reading: counted, with the first place, never silent."""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Remark(NamedTuple):
    rows: int
    first: str
    latest: str


class Notes:
    """Remarks, each with the number of rows it was made about."""

    def __init__(self) -> None:
        self._made: dict[str, _Remark] = {}

    def add(self, remark: str, place: str) -> None:
        """Make a remark about the row at a place; a second time about the same row counts once."""
        made = self._made.get(remark, _Remark(0, place, ""))
        if made.latest != place:
            self._made[remark] = made._replace(rows=made.rows + 1, latest=place)

    def lines(self) -> list[str]:
        """One line per remark, such as `3 × turns after the last answer are dropped (first: a.jsonl line 7)`."""
        return [f"{made.rows} × {remark} (first: {made.first})" for remark, made in self._made.items()]


class Reading(Generic[T]):
    """What every iteration reads anew, and what is to be said about it.

    Args:
        read: begins to read, and makes remarks.
    """

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
        """The remarks of one whole reading, in lines; until there was one, of the latest as far as it has come."""
        return self._notes.lines()
