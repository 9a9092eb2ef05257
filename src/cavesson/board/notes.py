"""Notes on steps and curves over HTTP."""

from typing import Annotated, Any

from pydantic import Field, StringConstraints

from cavesson.board.labels import MAX_NAME, MAX_NOTE
from cavesson.board.overview import steps_of
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import RunQuery
from cavesson.board.series import names_of
from cavesson.errors import UserError

MAX_METRIC = 500


class NoteQuery(RunQuery):
    step: int = Field(ge=0, le=2**31 - 1)
    """A step of the run."""
    metric: str | None = Field(None, max_length=MAX_METRIC)
    """Name of the curve, as in a request for series; null for the whole step."""
    text: Annotated[str, StringConstraints(strict=True, strip_whitespace=True, max_length=MAX_NOTE)]
    """The note; an empty one takes away what the author wrote there."""
    author: str = Field("", max_length=MAX_NAME)
    """Who writes it."""


def notes(board: Board, query: RunQuery) -> list[dict[str, Any]]:
    """Return the notes on steps and curves, each with its author and time, in the order of the steps."""
    return _all(board.run(query.run))


def put(board: Board, query: NoteQuery) -> list[dict[str, Any]]:
    """Write a note on a step or on a curve at a step, change it or take it away; return all notes."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    steps = steps_of(snapshot)
    if steps is None or not steps[0] <= query.step <= steps[1]:
        there = "no steps" if steps is None else f"steps {steps[0]} to {steps[1]}"
        raise UserError(f"a note cannot be on step {query.step}: the run has {there}")
    if query.metric is not None and query.metric.removeprefix("eval/") not in names_of(snapshot):
        raise UserError(f"a note cannot be on {query.metric!r}: the run has no such curve")
    run.notes.write(query.step, query.metric, query.text, query.author.strip())
    return _all(run)


def _all(run: OpenRun) -> list[dict[str, Any]]:
    return [note._asdict() for note in run.notes.all()]
