"""The parts of texts that a table shows: what a search has found, or the beginning."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.board.runs import OpenRun
from cavesson.board.search import spans_of
from cavesson.board.selection import Selection
from cavesson.index.texts import LENGTH as STORED
from cavesson.index.turns import TEXTS

LENGTH = 300
"""Characters of a text that a table shows."""
BEFORE = 80
"""Characters before a hit that is not at the beginning."""


class Excerpt(NamedTuple):
    """Part of a text; positions are counted in UTF-16 code units, as in JavaScript."""

    text: str
    start: int
    hit: list[int] | None
    turn: dict[str, Any] | None = None
    """The turn that it is of: its index ``turn``, ``role``, ``name``, and ``part``, one of ``TEXTS``."""


def excerpts(
    run: OpenRun, keys: list[tuple[int, int]], responses: list[str], turns: pa.Table, query: Selection | None
) -> list[Excerpt]:
    """Return what to show of some rows, given by step and sample: the first turn with a hit, else the response.

    ``responses`` are the beginnings of their responses, and ``turns`` those of ``read_turns``.
    """
    if query is None or not query.text or query.within != "response":
        return [Excerpt(text[:LENGTH], 0, None) for text in responses]
    found = _in_turns(run, turns, query)
    cut = [place for place, text in enumerate(responses) if len(text) == STORED and place not in found]
    if cut:
        whole = run.fetch([keys[place] for place in cut], ["response"])["response"].to_pylist()
        for place, text in zip(cut, whole, strict=True):
            responses[place] = text
    spans = spans_of(run, responses, query)
    return [
        found.get(place) or excerpt(text, span) for place, (text, span) in enumerate(zip(responses, spans, strict=True))
    ]


def _in_turns(run: OpenRun, turns: pa.Table, query: Selection) -> dict[int, Excerpt]:
    """Return the excerpt of the first turn with a hit of each row that has one, by the place of the row."""
    lines = turns.to_pylist()
    said = [(line, part, line[part]) for line in lines for part in TEXTS if line[part] is not None]
    found: dict[int, Excerpt] = {}
    for (line, part, text), span in zip(said, spans_of(run, [text for *_, text in said], query), strict=True):
        if span is not None and line["place"] not in found:
            turn = {name: line[name] for name in ("turn", "role", "name")} | {"part": part}
            found[line["place"]] = excerpt(text, span)._replace(turn=turn)
    return found


def excerpt(text: str, span: tuple[int, int] | None) -> Excerpt:
    """Return the part of a text around a hit, or its beginning if there is no hit.

    ``span`` is the start and length of the hit, in bytes of UTF-8.
    """
    if span is None:
        return Excerpt(text[:LENGTH], 0, None)
    data = text.encode("utf-8", "surrogatepass")
    begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80  # the bytes with which a character begins
    start, stop = (int(np.count_nonzero(begins[:place])) for place in (span[0], span[0] + span[1]))
    first = 0 if stop <= LENGTH else max(start - BEFORE, 0)
    shown = text[first : first + LENGTH]
    hit = [_units(shown[: start - first]), _units(shown[: stop - first])]
    return Excerpt(shown, _units(text[:first]), hit)


def _units(text: str) -> int:
    return len(text) + sum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4") > 0xFFFF)
