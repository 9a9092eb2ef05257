"""The excerpt of a long text that a table shows: its beginning, or the surroundings of a hit."""

from typing import NamedTuple

import numpy as np

LENGTH = 300
"""Characters."""
BEFORE = 80
"""Characters before a hit that is not at the beginning."""


class Excerpt(NamedTuple):
    """Part of a text; positions are counted in UTF-16 code units, as in JavaScript."""

    text: str
    start: int
    hit: list[int] | None


def excerpt(text: str, span: tuple[int, int] | None) -> Excerpt:
    """Return the part of a text that shows a hit, or its beginning if there is no hit.

    Args:
        text: The whole text.
        span: Start and length of the hit in bytes of UTF-8; None if there is no hit.
    """
    if span is None:
        return Excerpt(text[:LENGTH], 0, None)
    data = text.encode("utf-8", "surrogatepass")
    start, stop = (len(data[:place].decode("utf-8", "surrogatepass")) for place in (span[0], span[0] + span[1]))
    first = 0 if stop <= LENGTH else max(start - BEFORE, 0)
    shown = text[first : first + LENGTH]
    hit = [_units(shown[: start - first]), _units(shown[: stop - first])]
    return Excerpt(shown, _units(text[:first]), hit)


def _units(text: str) -> int:
    return len(text) + sum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") > 0xFFFF)
