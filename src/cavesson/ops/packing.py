"""Several sequences in one row, so that a batch of uneven lengths is hardly padded."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of sequences for each row of at most `capacity` tokens.

    First-fit decreasing (Johnson 1973): at most 11/9 of the fewest possible rows, and one. A sequence longer than the
    capacity has a row to itself.
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
