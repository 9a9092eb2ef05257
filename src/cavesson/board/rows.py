"""The table of responses: any page of any selection in any order."""

from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import Field

from cavesson.board.asked import shown as shown_prompts
from cavesson.board.excerpts import LENGTH, excerpts
from cavesson.board.runs import Board, OpenRun
from cavesson.board.search import matching
from cavesson.board.selection import Order, Page, Selection, order_of, page_of, place_of, step_of
from cavesson.index.columns import CODED, Array
from cavesson.index.prompt_ids import ids_of
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import OTHER


class RowsQuery(Selection, Page):
    sort: str = Field("step", max_length=200)
    """Column to sort by; with - in front the largest first."""
    at: str = Field("", pattern=r"^([0-9]{1,9}\.-?[0-9]{1,9})?$")
    """Step and sample of a rollout, such as 3.17: ``place`` is its place among the selected ones, from 0."""


def rows(board: Board, query: RowsQuery) -> dict[str, Any]:
    """Return one page of the selected rollouts; without any, ``left_out`` says how many of the other split match.

    ``place`` is that of the rollout ``at``; null if it is not among them.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    if not snapshot.rows:
        most = snapshot.state.recorded
        empty: dict[str, Any] = {"total": 0, "split": query.splits, "left_out": 0, "offset": 0, "rows": []}
        empty |= {"place": None}
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
        "place": _place(run, snapshot, query, order, found.mask),
        "rows": lines(run, snapshot, page, query),
    }


def _place(run: OpenRun, snapshot: Snapshot, query: RowsQuery, order: Order, mask: Array | None) -> int | None:
    if not query.at:
        return None
    step, sample = map(int, query.at.split("."))
    rows = step_of(run, snapshot, step, query.splits).rows
    return place_of(order, mask, rows[snapshot.raw("sample")[rows] == sample])


def _left_out(run: OpenRun, snapshot: Snapshot, query: RowsQuery) -> int:
    """Return how many rollouts of the other split match; 0 if none is left out."""
    if query.splits is None:
        return 0
    mask = matching(run, snapshot, query.model_copy(update={"split": OTHER[query.splits]})).mask
    return snapshot.rows if mask is None else int(np.count_nonzero(mask))


def lines(run: OpenRun, snapshot: Snapshot, page: Array, query: Selection | None = None) -> list[dict[str, Any]]:
    """Return what a table shows of each row: its numbers, what its prompt asks and an excerpt of its response.

    If the hit of a search is in a turn, the excerpt is of that turn, which ``hit_turn`` names. ``answer`` is what the
    policy said last, and ``tools`` the calls of each tool and those that failed; both are null without turns.
    """
    if not len(page):
        return []
    result = numbers(snapshot, page)
    keys = snapshot.keys(page)
    texts, turns = run.texts(snapshot, page), run.turns(snapshot, page)
    prompts = shown_prompts(run, snapshot, texts.prompt)
    parts = excerpts(run, keys, texts.response, turns, query)
    labels = run.labels.all()
    answers, tools, ids = _answers(turns, len(page)), _tools(snapshot, page), ids_of(snapshot, page)
    for line, answer, called, prompt_id in zip(result, answers, tools, ids, strict=True):
        line |= {"answer": answer, "tools": None if answer is None else called, "prompt_id": prompt_id}
    for row, line, prompt, shown, key in zip(page.tolist(), result, prompts, parts, keys, strict=True):
        line |= {"row": row, "prompt": prompt, "response": shown.text, "excerpt_start": shown.start, "hit": shown.hit}
        line |= {"hit_turn": shown.turn, "labels": [label._asdict() for label in labels.get(key, {}).values()]}
    return result


def answers(run: OpenRun, snapshot: Snapshot, page: Array) -> list[str | None]:
    """Return the start of what the policy said last in each of some rows; None if its turns are unknown."""
    return _answers(run.turns(snapshot, page), len(page))


def _answers(turns: pa.Table, count: int) -> list[str | None]:
    return [said and said[:LENGTH] for said in last_said(turns, count)]


def last_said(turns: pa.Table, count: int) -> list[str | None]:
    """Return what the policy said last in each of ``count`` rows, given their turns; None for rows without turns."""
    found: list[str | None] = [None] * count
    for place, role, text in zip(*(turns[name].to_pylist() for name in ("place", "role", "text")), strict=True):
        said = text if role == "assistant" and text and text.strip() else None
        found[place] = found[place] or "" if said is None else said
    return found


def _tools(snapshot: Snapshot, page: Array) -> list[dict[str, list[int]]]:
    """Return by tool the calls and the failed calls of some rows; without tools that were not called."""
    found: list[dict[str, list[int]]] = [{} for _ in page]
    calls, names = snapshot.calls, snapshot.state.tools
    for tools, *bounds in zip(found, *(places.tolist() for places in calls.of(page)), strict=True):
        own = calls.take(slice(*bounds))
        for tool, failed in zip(own.tool.tolist(), own.failed.tolist(), strict=True):
            counts = tools.setdefault(names[tool], [0, 0])
            counts[0] += 1
            counts[1] += failed
    return found


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
