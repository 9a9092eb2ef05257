"""The prompts of a run, sorted by what their responses earn, and one of them with all that was answered to it."""

from typing import Any, Literal

import numpy as np
from pydantic import Field

from cavesson.board.asked import shown
from cavesson.board.groups import spread
from cavesson.board.prompt_search import Within, prompts_with
from cavesson.board.prompt_table import PromptTable, solved, solved_from, table_of
from cavesson.board.rollout import MAX_TEXT
from cavesson.board.rows import plain
from cavesson.board.runs import Board, NotFoundError, OpenRun
from cavesson.board.selection import Page, SplitQuery
from cavesson.index.columns import Array
from cavesson.index.prompt_ids import PATTERN, ids_of_hashes, numbers_of
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import OTHER


class SolvedQuery(SplitQuery):
    solved: float | None = Field(None, allow_inf_nan=False)
    """Reward from which on a response solves its prompt; by default the highest, if some responses have it."""


class PromptsQuery(SolvedQuery, Page):
    sort: Literal["hardest", "easiest", "improved", "declined", "never", "always"] = "hardest"
    """By the mean reward; by its change from the first to the last step that has the prompt; never or always solved."""
    q: str = Field("", max_length=1_000)
    """Only prompts with this text, ignoring case, or with this id."""
    within: Within = "prompt"
    """Where the text is looked for: in prompts, in right answers, or in the reasons that rewards gave."""


class PromptQuery(SolvedQuery):
    prompt: str = Field(pattern=PATTERN)
    """Id of a prompt, the same in every run."""


def prompts(board: Board, query: PromptsQuery) -> dict[str, Any]:
    """Return the prompts of a run in an order, each with how often it was answered and what the responses earned.

    ``solved_from`` is the reward from which on a response counts as a solution. It is null, and no prompt is solved or
    unsolved, if the highest reward says nothing, as fewer than 1 % of the responses have it, or all of them. Without
    any prompt, ``left_out`` says how many the other split has.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    table = table_of(run, snapshot, query.split)
    least, counts = _solved(run, snapshot, table, query)
    order = _ordered(table, counts, query.sort)
    if text := query.q.strip():
        order = order[prompts_with(run, snapshot, query.split, table, text, query.within)[order]]
    page = order[query.offset : query.offset + query.limit]
    return {
        "total": len(order),
        "solved_from": least,
        "prompts": _lines(run, snapshot, table, counts, page, table.newest[page] & 0xFFFFFFFF),
        "left_out": 0 if table.n.any() else int(np.count_nonzero(table_of(run, snapshot, OTHER[query.split]).n)),
    }


def prompt(board: Board, query: PromptQuery) -> dict[str, Any]:
    """Return one prompt: its text and right answer, the rewards of its responses by step, and its place among others.

    ``harder`` and ``easier`` are the numbers of prompts with a lower and a higher mean reward. ``first``, ``last``,
    ``best`` and ``worst`` name responses; of equal ones, the earliest.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    found = numbers_of(snapshot, [query.prompt])
    if not len(found):
        raise NotFoundError(f"{run.name} has no prompt {query.prompt}")
    table = table_of(run, snapshot, query.split)
    least, counts = _solved(run, snapshot, table, query)
    rows = _rows(snapshot, int(found[0]), snapshot.of(query.split))
    left_out = 0 if len(rows) else int(table_of(run, snapshot, OTHER[query.split]).n[found[0]])
    if not len(rows) and not left_out:
        raise NotFoundError(f"{run.name} has no prompt {query.prompt}")
    shown = rows if len(rows) else _rows(snapshot, int(found[0]), snapshot.of(OTHER[query.split]))
    mean = table.mean
    return {
        **_lines(run, snapshot, table, counts, found, shown[-1:])[0],
        **_texts(run, snapshot, shown[-1:]),
        "solved_from": least,
        "harder": int(np.count_nonzero(mean < mean[found[0]])),
        "easier": int(np.count_nonzero(mean > mean[found[0]])),
        "steps": _steps(snapshot, rows),
        **_chosen(snapshot, rows),
        "left_out": left_out,
    }


def _solved(
    run: OpenRun, snapshot: Snapshot, table: PromptTable, query: SolvedQuery
) -> tuple[float | None, Array | None]:
    """Return the reward from which on a response solves its prompt, and [P] how many do; None if that is unknown."""
    least = solved_from(run, snapshot, query.split, table) if query.solved is None else query.solved
    return least, None if least is None else solved(run, snapshot, query.split, least)


def _ordered(table: PromptTable, solved: Array | None, sort: str) -> Array:
    """Return the numbers of the prompts that belong to a list, in its order."""
    if sort in ("never", "always"):
        if solved is None:
            return np.empty(0, np.int64)
        kept = np.flatnonzero((table.scored > 0) & (solved == (0 if sort == "never" else table.scored)))
        return kept[np.argsort(-table.scored[kept], kind="stable")]
    by = table.mean if sort in ("hardest", "easiest") else table.change
    kept = np.flatnonzero(~np.isnan(by))
    ascending = by[kept] if sort in ("hardest", "declined") else -by[kept]
    return kept[np.lexsort((-table.scored[kept], ascending))]


def _lines(
    run: OpenRun, snapshot: Snapshot, table: PromptTable, solved: Array | None, page: Array, rows: Array
) -> list[dict[str, Any]]:
    """Return what is known of some prompts, given by their numbers and a row of each; null for what is not known."""
    if not len(rows):
        return []
    columns = {
        "prompt_id": ids_of_hashes(snapshot.prompts[page]),
        "group": plain(snapshot, "group", rows) if "group" in snapshot.state.columns else [None] * len(rows),
        "prompt": shown(run, snapshot, run.texts(snapshot, rows).prompt),
        "n": table.n[page].tolist(),
        "unscored": (table.n - table.scored)[page].tolist(),
        "solved": [None] * len(rows) if solved is None else solved[page].tolist(),
        "mean": table.mean[page].tolist(),
        "change": table.change[page].tolist(),
        "first_mean": table.first.mean[page].tolist(),
        "last_mean": table.last.mean[page].tolist(),
    }
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rows(snapshot: Snapshot, number: int, mask: Array | None) -> Array:
    """Return the rows of a prompt in the order of step and sample."""
    there = snapshot.raw("prompt") == number
    rows = np.flatnonzero(there if mask is None else there & mask)
    return rows[np.lexsort((snapshot.raw("sample")[rows], snapshot.raw("step")[rows]))]


def _texts(run: OpenRun, snapshot: Snapshot, rows: Array) -> dict[str, Any]:
    """Return the whole prompt of one row and its right answer, cut to what a page can show."""
    row = run.fetch(snapshot.keys(rows), ["prompt", "ground_truth"]).to_pylist()[0]
    texts: dict[str, Any] = {}
    for name, text in row.items():
        texts |= {name: text and text[:MAX_TEXT]}
        texts |= {f"{name}_truncated": len(text) if text is not None and len(text) > MAX_TEXT else None}
    return texts


def _steps(snapshot: Snapshot, rows: Array) -> dict[str, Array]:
    """Return the steps of some rows, and for each the number of its responses and the spread of their rewards."""
    steps, of = np.unique(snapshot.raw("step")[rows], return_inverse=True)
    return {"step": steps, **spread(snapshot.take("reward", rows).astype(np.float64), of, len(steps))}


def _chosen(snapshot: Snapshot, rows: Array) -> dict[str, dict[str, int] | None]:
    """Return the places of the first, the last, the best and the worst of some rows; None where there is none."""
    reward = snapshot.take("reward", rows)
    scored = np.flatnonzero(~np.isnan(reward))
    chosen: dict[str, int | None] = dict.fromkeys(("first", "last", "best", "worst"))
    if len(rows):
        chosen |= {"first": 0, "last": len(rows) - 1}
    if len(scored):
        chosen |= {
            name: int(scored[pick(reward[scored])]) for name, pick in (("best", np.argmax), ("worst", np.argmin))
        }
    return {name: None if at is None else _place(snapshot, int(rows[at])) for name, at in chosen.items()}


def _place(snapshot: Snapshot, row: int) -> dict[str, int]:
    return {name: int(snapshot.raw(name)[row]) for name in ("step", "sample")}
