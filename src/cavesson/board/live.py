"""Server-sent events about what was added to the runs since a cursor."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

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
    after: str = Field("", max_length=20_000)
    """The cursor of the last event that was seen; events from now on if empty."""


def events(board: Board, query: EventsQuery) -> StreamingResponse:
    """Stream an event whenever the index of a run has grown.

    The cursor tells how far the index of each run has progressed, such as ``a=640.0.1.640.20.0,b=0.0.0.0.0.0``. A
    client that reconnects with it immediately receives what was added in the meantime. Another event names the runs
    that have ``appeared`` in the folders of the board.
    """
    return StreamingResponse(_stream(board, query.after), media_type="text/event-stream")


async def _stream(board: Board, after: str) -> AsyncIterator[bytes]:
    seen, names = {run.key: _position(run) for run in board.runs} | _parse(after), board.names
    yield b"retry: 1000\n\n"
    silent = 0.0
    while not board.closing.is_set():
        await asyncio.to_thread(board.look)
        appeared = board.names - names
        if appeared:
            names = board.names
            yield b"data: " + orjson.dumps({"appeared": sorted(appeared)}) + b"\n\n"
        for run in board.runs:
            position = _position(run)
            before = seen.setdefault(run.key, position)
            if position != before:
                event = _event(run, before)
                seen[run.key] = position
                cursor = _cursor(seen)
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
        "run": run.key,
        "steps": [int(new.min()), int(new.max())] if len(new) else None,
        "restarted": snapshot.attempts != seen.attempts or snapshot.rows < seen.rows,
        "rollouts": snapshot.count("train"),
        "held_out": snapshot.count(HELD_OUT),
        "indexed": run.indexed(),
    }


def _cursor(seen: Mapping[str, Position]) -> str:
    # Browsers send it back as a header, which is ASCII.
    return ",".join(f"{quote(name)}={'.'.join(map(str, place))}" for name, place in seen.items())


def _parse(cursor: str) -> dict[str, Position]:
    """Return the positions in a cursor, by run; none if it is not a cursor of this version."""
    seen = {}
    for part in cursor.split(",") if cursor else ():
        name, _, place = part.partition("=")
        try:
            seen[unquote(name)] = Position(*map(int, place.split(".")))
        except (ValueError, TypeError):
            return {}
    return seen
