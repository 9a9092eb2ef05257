"""The tools of one step: how often each was called, how often that failed, and how long it took."""

from collections import Counter
from typing import Any

import numpy as np
from pydantic import Field

from cavesson.board.runs import Board, reading
from cavesson.board.selection import SplitQuery, step_of


class ToolsQuery(SplitQuery):
    step: int = Field(ge=0, lt=2**31)
    """Training step."""


def tools(board: Board, query: ToolsQuery) -> dict[str, Any]:
    """Return for each tool its calls, those that failed, the usual error, its seconds, and rewards with and without.

    ``rollouts`` is the number of rollouts whose turns are known, and ``turns`` the mean number of turns of the policy.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    rows = step_of(run, snapshot, query.step, query.split).rows
    if not len(rows) or "turns" not in snapshot.names:
        return {"rollouts": 0, "turns": None, "tools": []}
    turns = snapshot.take("turns", rows).astype(float)
    rows, turns = rows[~np.isnan(turns)], turns[~np.isnan(turns)]
    rewards = dict(zip(snapshot.raw("sample")[rows].tolist(), snapshot.take("reward", rows).tolist(), strict=True))
    with reading():
        lines = run.record.turns(query.step).to_pylist()
    calls: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if line["role"] == "tool" and line["sample"] in rewards:
            calls.setdefault(line["name"] or "", []).append(line)
    return {
        "rollouts": len(rows),
        "turns": float(turns.mean()) if len(turns) else None,
        "tools": [_tool(name, calls[name], rewards) for name in sorted(calls)],
    }


def _tool(name: str, calls: list[dict[str, Any]], rewards: dict[int, float]) -> dict[str, Any]:
    """Return the numbers of a tool from its calls; its name is empty if the calls name none.

    ``rewards`` are those of all samples of the step; NaN for none.
    """
    seconds = [call["seconds"] for call in calls if call["seconds"] is not None]
    errors = Counter(call["error"] for call in calls if call["error"] is not None)
    callers = {call["sample"] for call in calls}
    return {
        "name": name,
        "calls": len(calls),
        "errors": errors.total(),
        "usual_error": errors.most_common(1)[0][0][:300] if errors else None,
        "seconds": float(np.mean(seconds)) if seconds else None,
        "slowest": max(seconds, default=None),
        "rollouts": len(callers),
        "reward_with": _mean([reward for sample, reward in rewards.items() if sample in callers]),
        "reward_without": _mean([reward for sample, reward in rewards.items() if sample not in callers]),
    }


def _mean(rewards: list[float]) -> float | None:
    known = [reward for reward in rewards if not np.isnan(reward)]
    return float(np.mean(known)) if known else None
