"""Stars and notes over HTTP."""

from typing import Any

from pydantic import Field

from cavesson.board.rollout import RolloutQuery, read
from cavesson.board.runs import Board, NotFoundError
from cavesson.board.selection import RunQuery

MAX_NOTE = 10_000


class StarQuery(RolloutQuery):
    note: str = Field("", max_length=MAX_NOTE)
    """Note on the rollout; in the body."""


def stars(board: Board, query: RunQuery) -> list[dict[str, Any]]:
    """Return every star with its note."""
    found = sorted(board.run(query.run).stars.all().items())
    return [{"step": step, "sample": sample, "note": note} for (step, sample), note in found]


def put(board: Board, query: StarQuery) -> dict[str, Any]:
    """Star a rollout, or change its note."""
    run = board.run(query.run)
    read(run, query.step, query.sample)
    run.stars.put(query.step, query.sample, query.note)
    return {"step": query.step, "sample": query.sample, "note": query.note}


def remove(board: Board, query: RolloutQuery) -> dict[str, Any]:
    """Remove a star."""
    if not board.run(query.run).stars.remove(query.step, query.sample):
        raise NotFoundError(f"step {query.step}, sample {query.sample} has no star")
    return {}
