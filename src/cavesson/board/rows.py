"""The table of responses: any page of any selection in any order."""

from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from cavesson.board.runs import Board, OpenRun, reading
from cavesson.board.search import matching, spans_of
from cavesson.board.selection import Page, Selection, order_of, page_of
from cavesson.index.columns import CALLS, CODED, FAILED, Array
from cavesson.index.snapshot import Snapshot
from cavesson.index.texts import LENGTH as STORED
from cavesson.record.splits import OTHER

LENGTH = 300
"""Characters of a text that a table shows."""
BEFORE = 80
"""Characters before a hit that is not at the beginning."""


class Excerpt(NamedTuple):
    """Part of a text; positions are counted in UTF-16 code units, as in JavaScript."""

    text: str
    start: int
    hit: list[int] | None


class RowsQuery(Selection, Page):
    sort: str = Field("step", max_length=200)
    """Column to sort by; with - in front the largest first."""


def rows(board: Board, query: RowsQuery) -> dict[str, Any]:
    """Return one page of the selected rollouts; without any, ``left_out`` says how many of the other split match."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    if not snapshot.rows:
        most = snapshot.state.recorded
        empty: dict[str, Any] = {"total": 0, "split": query.splits, "left_out": 0, "offset": 0, "rows": []}
        return empty | {"at_most": most > 0, "most": most, "stopped": None}
    order = order_of(run, snapshot, query.sort)
    found = matching(run, snapshot, query, order, enough=query.offset + query.limit)
    total, page = page_of(order, found.mask, query.offset, query.limit)
    return {
        "total": total,
        "split": query.splits,
        "left_out": 0 if total else _left_out(run, snapshot, query),
        "at_most": found.most is not None,
        "most": total if found.most is None else found.most,
        "stopped": found.stopped,
        "offset": query.offset,
        "rows": lines(run, snapshot, page, query),
    }


def _left_out(run: OpenRun, snapshot: Snapshot, query: RowsQuery) -> int:
    """Return how many rollouts of the other split match; 0 if none is left out."""
    if query.splits is None:
        return 0
    mask = matching(run, snapshot, query.model_copy(update={"split": OTHER[query.splits]})).mask
    return snapshot.rows if mask is None else int(np.count_nonzero(mask))


def lines(run: OpenRun, snapshot: Snapshot, page: Array, query: Selection | None = None) -> list[dict[str, Any]]:
    """Return what a table shows of each row: its numbers, the start of its prompt and an excerpt of its response.

    ``answer`` is what the policy said last, and ``tools`` the calls of each tool and those that failed; both are null
    if the turns are unknown.
    """
    if not len(page):
        return []
    result = numbers(snapshot, page)
    keys = snapshot.keys(page)
    texts = run.texts(snapshot, page)
    prompts = [text[:LENGTH] for text in texts.prompt]
    excerpts = _excerpts(run, keys, texts.response, query)
    stars = run.stars.all()
    last, tools = answers(run, snapshot, page), _tools(snapshot, page)
    for line, key, called in zip(result, keys, tools, strict=True):
        line |= {"answer": last.get(key), "tools": called if key in last else None}
    for row, line, prompt, shown, key in zip(page.tolist(), result, prompts, excerpts, keys, strict=True):
        line |= {"row": row, "prompt": prompt, "response": shown.text, "excerpt_start": shown.start, "hit": shown.hit}
        line |= {"starred": key in stars, "note": stars.get(key)}
    return result


def answers(run: OpenRun, snapshot: Snapshot, page: Array) -> dict[tuple[int, int], str]:
    """Return the start of what the policy said last in each of some rows whose turns are known, by step and sample."""
    if "turns" not in snapshot.names:
        return {}
    known = page[~np.isnan(snapshot.take("turns", page).astype(float))]
    with reading():
        turns = run.record.turns_of(snapshot.keys(known)).select(["step", "sample", "role", "text"])
    found: dict[tuple[int, int], str] = dict.fromkeys(snapshot.keys(known), "")
    for step, sample, role, text in zip(*(column.to_pylist() for column in turns.columns), strict=True):
        if role == "assistant" and text and text.strip():
            found[step, sample] = text[:LENGTH]
    return found


def _tools(snapshot: Snapshot, page: Array) -> list[dict[str, list[int]]]:
    """Return by tool the calls and the failed calls of some rows; without tools that were not called."""
    found: list[dict[str, list[int]]] = [{} for _ in page]
    for tool in snapshot.tools:
        calls, failed = (snapshot.raw(kind + tool)[page].tolist() for kind in (CALLS, FAILED))
        for tools, *counts in zip(found, calls, failed, strict=True):
            if counts[0] > 0:
                tools[tool] = counts
    return found


def _excerpts(
    run: OpenRun, keys: list[tuple[int, int]], responses: list[str], query: Selection | None
) -> list[Excerpt]:
    """Return the excerpts to show of responses, given their beginnings."""
    if query is None or not query.text:
        return [Excerpt(text[:LENGTH], 0, None) for text in responses]
    cut = [place for place, text in enumerate(responses) if len(text) == STORED]
    if cut:
        whole = run.fetch([keys[place] for place in cut], ["response"])["response"].to_pylist()
        for place, text in zip(cut, whole, strict=True):
            responses[place] = text
    spans = spans_of(run, responses, query)
    return [excerpt(text, span) for text, span in zip(responses, spans, strict=True)]


def excerpt(text: str, span: tuple[int, int] | None) -> Excerpt:
    """Return the part of a text that shows a hit, or its beginning if there is no hit.

    Args:
        text: The whole text.
        span: Start and length of the hit in bytes of UTF-8; None if there is no hit.
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


def numbers(snapshot: Snapshot, page: Array) -> list[dict[str, Any]]:
    """Return the columns of some rows, one dictionary per row; null for values that were not measured."""
    result: list[dict[str, Any]] = [{"parts": {}} for _ in page]
    for name in snapshot.names:
        values = plain(snapshot, name, page)
        part = name.removeprefix("part/")
        for line, value in zip(result, values, strict=True):
            if part == name:
                line[name] = value
            else:
                line["parts"][part] = value
    return result


def plain(snapshot: Snapshot, name: str, page: Array) -> list[Any]:
    """Return one column of some rows as Python numbers or strings."""
    if name in CODED:
        known = snapshot.state.codes[name]
        return [known[code] if code < len(known) else None for code in snapshot.raw(name)[page].tolist()]
    values = snapshot.take(name, page)
    if values.dtype.kind == "i":
        return list(values.tolist())
    if np.issubdtype(np.dtype(snapshot.state.columns[name].dtype), np.integer):
        return [None if value != value else int(value) for value in values.tolist()]
    # The shortest decimal that gives this float32, so that the page shows 0.1 and not 0.10000000149.
    return [float(str(value)) if np.isfinite(value) else None for value in values]
