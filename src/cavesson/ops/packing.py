"""Packing several sequences into one row, so that a batch of uneven lengths needs little padding."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class RowShape(NamedTuple):
    """What the rows of a model may look like, and what their width costs."""

    balance: int
    """tokens in a row at which attention costs as much as everything else"""
    widest: int | None = None
    """tokens in a row of several sequences, at most; None = any number"""

    def cost(self, rows: int, width: int | float) -> int | float:
        """Return the work of rows of a width: that of a token grows with the tokens that attention looks at."""
        return rows * width * (self.balance + width)


def pack(lengths: Sequence[int], shape: RowShape) -> list[list[int]]:
    """Return the indices of the sequences in each row, for as many rows as cost the least, padding included.

    Fewer rows need less padding, and more attention.
    """
    longest, total = max(lengths, default=0), sum(lengths)
    best, least = [[index] for index in range(len(lengths))], shape.cost(len(lengths), longest)

    def at_least(rows: int) -> int | float:
        return shape.cost(rows, max(longest, total / rows))

    for count in sorted(range(1, len(lengths)), key=at_least):
        if at_least(count) >= least:
            break
        rows = spread(lengths, count)
        width = width_of(lengths, rows)
        if (shape.widest is None or width <= shape.widest) and shape.cost(count, width) < least:
            best, least = rows, shape.cost(count, width)
    return best


def spread(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of the sequences in each of `count` rows, which are of about the same width.

    The longest first, each into the row with the fewest tokens: the widest row has at most 4/3 − 1/(3·count) of the
    tokens that it must have (Graham 1969, doi:10.1137/0117039).
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, row) for row in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, row = heapq.heappop(filled)
        rows[row].append(index)
        heapq.heappush(filled, (tokens + lengths[index], row))
    return rows


def width_of(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    """Return the number of tokens in the widest row."""
    return max((sum(lengths[index] for index in row) for row in rows), default=0)


def fill(parts: Sequence[Sequence[int]], most: int, padded: bool) -> list[list[int]]:
    """Return the indices of the sequences in each micro-batch of at most `most` tokens; a longer one is alone.

    The longest come first, each into the first micro-batch with room for it. A sequence has `parts`, such as prompt and
    response, and their numbers of tokens; `padded` are the parts that are padded to the longest in the micro-batch,
    where padding counts.
    """

    def tokens(members: Sequence[int]) -> int:
        each = [parts[index] for index in members]
        return len(each) * sum(map(max, zip(*each, strict=True))) if padded else sum(map(sum, each))

    filled: list[list[int]] = []
    for index in sorted(range(len(parts)), key=lambda i: -sum(parts[i])):
        room = next((members for members in filled if tokens([*members, index]) <= most), None)
        if room is None:
            filled.append([index])
        else:
            room.append(index)
    return filled
