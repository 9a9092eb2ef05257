"""What was dropped, skipped or looked odd while reading: counted, with the first place, never silent."""

from typing import NamedTuple


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
