"""Packing several sequences into one row, so that a batch of uneven lengths needs little padding."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return the indices of the sequences in each row of at most `capacity` tokens.

    First-fit decreasing (Johnson 1973) needs at most 11/9 of the minimum number of rows, plus one. A sequence longer
    than the capacity gets a separate row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows
