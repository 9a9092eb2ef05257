"""The responses to one prompt side by side, and the prompts on which the policy never beats the reference."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

import numpy as np
from pydantic import Field

from cavesson.board.asked import shown
from cavesson.board.excerpts import LENGTH as SHOWN
from cavesson.board.rows import answers, plain
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import CHUNK, Page, SplitQuery, step_of
from cavesson.index.columns import MISSING, Array
from cavesson.index.prompt_ids import ids_of
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import OTHER, Split

NAMELESS = np.int64(-(2**63) + 2**31)
"""Numbers from here on stand for prompts that have no group."""
LAST_NAMELESS = NAMELESS + 2**31
MAX_SHOWN = 64
"""Responses of a group."""


class GroupsQuery(SplitQuery, Page):
    step: int = Field(ge=0, lt=2**31)
    """Training step."""
    sort: Literal["group", "-group", "mean", "-mean", "sd", "-sd", "min", "-min", "max", "-max", "n", "-n"] = "-sd"
    """Sort order; a leading - means descending."""


class NeverBeatsQuery(SplitQuery, Page):
    pass


def groups(board: Board, query: GroupsQuery) -> dict[str, Any]:
    """Return the groups of one step: the responses to each prompt, and the spread of their rewards."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    rows = step_of(run, snapshot, query.step, query.split).rows
    if not len(rows):
        return {"total": 0, "groups": [], "left_out": len(step_of(run, snapshot, query.step, OTHER[query.split]).rows)}
    names, of = np.unique(group_of(snapshot, rows), return_inverse=True)
    found = spread(snapshot.take("reward", rows).astype(np.float64), of, len(names))
    sort = query.sort.removeprefix("-")
    by = names if sort == "group" else found[sort]
    order = np.argsort(-by if query.sort.startswith("-") else by, kind="stable")
    page = order[query.offset : query.offset + query.limit]
    members = [rows[of == group] for group in page]
    ids = ids_of(snapshot, np.array([member[0] for member in members], np.int64))
    shown = _shown(run, snapshot, np.concatenate([member[:MAX_SHOWN] for member in members] or [rows[:0]]))
    lines = []
    for group, member, prompt_id in zip(page, members, ids, strict=True):
        line = {name: values[group].item() for name, values in found.items()}
        responses = list(islice(shown, len(member[:MAX_SHOWN])))
        prompts = [response.pop("prompt") for response in responses]
        lines.append(
            {
                "group": int(names[group]) if names[group] > LAST_NAMELESS else None,
                "prompt_id": prompt_id,
                "prompt": prompts[0],
                **line,
                "zero_variance": bool(line["n"] - line["unscored"] > 1 and line["min"] == line["max"]),
                "samples": snapshot.raw("sample")[member].tolist(),
                "rows": responses,
            }
        )
    return {"total": len(names), "groups": lines, "left_out": 0}


def _shown(run: OpenRun, snapshot: Snapshot, rows: Array) -> Iterator[dict[str, Any]]:
    """Yield what a group shows of each row: its step and sample, its reward, and the beginnings of its texts.

    Of an episode, ``response`` is what the policy said last.
    """
    texts = run.texts(snapshot, rows)
    last = answers(run, snapshot, rows)
    columns = (plain(snapshot, name, rows) for name in ("step", "sample", "reward"))
    prompts = shown(run, snapshot, texts.prompt)
    for step, sample, reward, prompt, response, answer in zip(*columns, prompts, texts.response, last, strict=True):
        places = {"step": step, "sample": sample, "reward": reward}
        yield places | {"prompt": prompt, "response": (response if answer is None else answer)[:SHOWN]}


def spread(rewards: Array, of: Array, count: int) -> dict[str, Array]:
    """Return n, the number of responses of each group, how many have no reward, and statistics of the other rewards."""
    n, scored = np.bincount(of, minlength=count), ~np.isnan(rewards)
    of, rewards = of[scored], rewards[scored]
    known = np.bincount(of, minlength=count)
    low, high = np.full(count, np.inf), np.full(count, -np.inf)
    with np.errstate(invalid="ignore"):  # a group with an infinite reward, or with none, has no finite statistics
        np.minimum.at(low, of, rewards)
        np.maximum.at(high, of, rewards)
        mean = np.bincount(of, rewards, minlength=count) / known
        sd = np.sqrt(np.bincount(of, (rewards - mean[of]) ** 2, minlength=count) / known)
    found = {"mean": mean, "sd": sd, "min": low, "max": high}
    return {"n": n, "unscored": n - known} | {name: np.where(known, one, np.nan) for name, one in found.items()}


def never_beats(board: Board, query: NeverBeatsQuery) -> dict[str, Any]:
    """Return the prompts on which no response got a higher reward than the reference's, those with most tries first."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    if "gap" not in snapshot.state.columns:
        return {"total": 0, "prompts": []}
    key = (snapshot.rows, snapshot.state.dead, query.split)
    tries, best, last = run.cache.get("best", key, lambda: _best(snapshot, query.split), most=2)
    never = np.flatnonzero((tries > 0) & (best <= 0))
    order = never[np.lexsort((best[never], -tries[never]))]
    page = order[query.offset : query.offset + query.limit]
    rows = last[page]
    groups = plain(snapshot, "group", rows) if "group" in snapshot.state.columns else [None] * len(rows)
    texts = shown(run, snapshot, run.texts(snapshot, rows).prompt)
    prompts = [
        {"prompt_id": prompt_id, "group": group, "prompt": text, "tries": int(tries[number])}
        | {"best_gap": float(best[number]), "last_step": step, "last_sample": sample}
        for number, prompt_id, group, text, (step, sample) in zip(
            page, ids_of(snapshot, rows), groups, texts, snapshot.keys(rows), strict=True
        )
    ]
    return {"total": len(never), "prompts": prompts}


def _best(snapshot: Snapshot, split: Split) -> tuple[Array, Array, Array]:
    """Return for each prompt the number of comparisons with a reference, the best gap, and the newest row."""
    count, mask = snapshot.state.prompts, snapshot.of(split)
    gap, step, prompt = snapshot.column("gap"), snapshot.raw("step"), snapshot.raw("prompt")
    # The same dtype as the compared column, which makes np.maximum.at twenty times as fast.
    tries, best, newest = np.zeros(count, np.int64), np.full(count, -np.inf, gap.dtype), np.zeros(count, np.int64)
    for start in range(0, snapshot.rows, CHUNK):
        rows = slice(start, start + CHUNK)
        measured = ~np.isnan(gap[rows]) & (prompt[rows] >= 0)
        if mask is not None:
            measured &= mask[rows]
        of = prompt[rows][measured]
        tries += np.bincount(of, minlength=count)
        np.maximum.at(best, of, gap[rows][measured])
        np.maximum.at(newest, of, step[rows][measured].astype(np.int64) << 32 | (start + np.flatnonzero(measured)))
    return tries, best, newest & 0xFFFFFFFF


def group_of(snapshot: Snapshot, rows: Array) -> Array:
    """Return a number that identifies the prompt within a step: the recorded group, or else a number for the text."""
    nameless = NAMELESS + snapshot.raw("prompt")[rows]
    if "group" not in snapshot.state.columns:
        return nameless
    group = snapshot.raw("group")[rows]
    return np.where(group == MISSING["<i8"], nameless, group)
