"""The responses of one group with all that tells them apart: texts, final answers, rewards and advantages."""

from typing import Any

import numpy as np
import pyarrow as pa

from cavesson.board.excerpts import LENGTH
from cavesson.board.groups import MAX_SHOWN, group_of
from cavesson.board.rollout import RolloutQuery, read, split_of
from cavesson.board.rows import last_said, plain
from cavesson.board.runs import Board, OpenRun, reading
from cavesson.board.selection import step_of
from cavesson.index.columns import Array
from cavesson.index.rescored import PREFIX
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import Split
from cavesson.text.final_answer import short_answer

MAX_TEXT = 200_000
"""Characters of a response that are sent."""
COLUMNS = [
    "step", "sample", "reward", "length", "finish_reason", "response",
    "reward_parts", "reward_weights", "reward_reasons",
]  # fmt: skip


def group(board: Board, query: RolloutQuery) -> dict[str, Any]:
    """Return the responses to the prompt of a rollout in its step, all of its split.

    ``answer`` is the final answer of a response: what is boxed, what follows ####, or the last number; of an episode
    whose last turn has none of these, the start of that turn. ``advantage`` is the mean over the tokens that were
    learned from, and ``rescored`` has the rewards that ``cavesson rescore`` computed. ``total`` counts all responses,
    of which at most 64 are returned.
    """
    run = board.run(query.run)
    row = read(run, query.step, query.sample).row
    snapshot = run.snapshot()
    rows = _members(run, snapshot, query, split_of(row))
    shown = rows[:MAX_SHOWN]
    return {
        "total": len(rows),
        "ground_truth": row["ground_truth"] and row["ground_truth"][:MAX_TEXT],
        "responses": _responses(run, snapshot, shown) if len(shown) else [],
    }


def _members(run: OpenRun, snapshot: Snapshot, query: RolloutQuery, split: Split) -> Array:
    """Return the rows of the group of a rollout, by sample; none if the rollout is not indexed yet."""
    rows = step_of(run, snapshot, query.step, split).rows
    if not len(rows):
        return rows
    group = group_of(snapshot, rows)
    return rows[np.isin(group, group[snapshot.raw("sample")[rows] == query.sample])]


def _responses(run: OpenRun, snapshot: Snapshot, rows: Array) -> list[dict[str, Any]]:
    keys = snapshot.keys(rows)
    lines: list[dict[str, Any]] = run.fetch(keys, COLUMNS).to_pylist(maps_as_pydicts="strict")
    with reading():
        advantages = mean_advantages(run.record.tokens_of(keys), [sample for _, sample in keys])
    said = last_said(run.turns(snapshot, rows), len(rows))
    rescored = {name: plain(snapshot, PREFIX + name, rows) for name in sorted(snapshot.state.rescored)}
    for at, (line, advantage, last) in enumerate(zip(lines, advantages, said, strict=True)):
        response = line["response"]
        for name in ("parts", "weights", "reasons"):
            line[name] = line.pop(f"reward_{name}") or {}
        line["labels"] = [label._asdict() for label in run.labels.of((line["step"], line["sample"]))]
        line |= {"advantage": advantage, "answer": short_answer(last or response) or (last and last[:LENGTH])}
        line |= {"rescored": {name: values[at] for name, values in rescored.items()}, "response": response[:MAX_TEXT]}
        line |= {"response_truncated": len(response) if len(response) > MAX_TEXT else None}
    return lines


def mean_advantages(tokens: pa.Table, samples: list[int]) -> list[float | None]:
    """Return by sample the mean advantage of the tokens that training learned from; None without any."""
    advantage = tokens["advantage"].to_numpy().astype(np.float64)
    there = np.isfinite(advantage) & tokens["learned"].fill_null(True).to_numpy()
    order = np.argsort(samples)
    of = order[np.searchsorted(np.array(samples), tokens["sample"].to_numpy()[there], sorter=order)]
    total, count = np.bincount(of, advantage[there], len(samples)), np.bincount(of, minlength=len(samples))
    return [float(t / n) if n else None for t, n in zip(total, count, strict=True)]
