"""Server-sent events about what was added to the runs since a cursor."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np
import orjson
from pydantic import Field
from starlette.responses import StreamingResponse

from cavesson.board.findings import looked_at
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import Query
from cavesson.index.columns import Array
from cavesson.record.splits import HELD_OUT

PAUSE = 0.25
"""Seconds between two looks at the indexes."""
BREATH = 15.0
"""Seconds of silence after which a line is sent that keeps the connection open."""


class Position(NamedTuple):
    """How far the index of a run has progressed."""

    rows: int
    dead: int
    attempts: int
    text_rows: int
    metrics: int
    findings: int
    """When the doctor last looked."""


class EventsQuery(Query):
    after: str = Field("", max_length=2_000)
    """The cursor of the last event that was seen; events from now on if empty."""


def events(board: Board, query: EventsQuery) -> StreamingResponse:
    """Stream an event whenever the index of a run has grown.

    The cursor tells how far the index of each run has progressed, such as ``640.0.1.640.20.0-1280.64.2.0.21.0``. A
    client that reconnects with it immediately receives what was added in the meantime.
    """
    return StreamingResponse(_stream(board, query.after), media_type="text/event-stream")


async def _stream(board: Board, after: str) -> AsyncIterator[bytes]:
    seen = _parse(after, len(board.runs)) or [_position(run) for run in board.runs]
    yield b"retry: 1000\n\n"
    silent = 0.0
    while not board.closing.is_set():
        for number, run in enumerate(board.runs):
            position = _position(run)
            if position != seen[number]:
                event = _event(run, seen[number])
                seen[number] = position
                cursor = "-".join(".".join(map(str, place)) for place in seen)
                yield b"id: " + cursor.encode() + b"\ndata: " + orjson.dumps({"cursor": cursor, **event}) + b"\n\n"
                silent = 0.0
        await asyncio.sleep(PAUSE)
        silent += PAUSE
        if silent >= BREATH:
            yield b": still here\n\n"
            silent = 0.0


def _position(run: OpenRun) -> Position:
    snapshot = run.snapshot()
    state = snapshot.state
    return Position(state.rows, state.dead, snapshot.attempts, state.text_rows, state.metrics, looked_at(run))


def _event(run: OpenRun, seen: Position) -> dict[str, Any]:
    """Return which steps have new rollouts, and the current progress of the run."""
    snapshot = run.snapshot()
    new: Array = snapshot.raw("step")[min(seen.rows, snapshot.rows) :] if snapshot.rows else np.empty(0, np.int32)
    return {
        "run": run.number,
        "steps": [int(new.min()), int(new.max())] if len(new) else None,
        "restarted": snapshot.attempts != seen.attempts or snapshot.rows < seen.rows,
        "rollouts": snapshot.count("train"),
        "held_out": snapshot.count(HELD_OUT),
        "indexed": run.indexed(),
    }


def _parse(cursor: str, runs: int) -> list[Position] | None:
    """Return the positions in a cursor, or None if the cursor does not match this board."""
    try:
        places = [tuple(int(number) for number in place.split(".")) for place in cursor.split("-")]
    except ValueError:
        return None
    if len(places) != runs or any(len(place) != len(Position._fields) for place in places):
        return None
    return [Position(*place) for place in places]
