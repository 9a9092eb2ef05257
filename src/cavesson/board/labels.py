"""Labels over HTTP: stars, ratings, tags, notes and preferences."""

from typing import Annotated, Any

from pydantic import Field, StrictInt, StringConstraints, model_validator

from cavesson.board.rollout import RolloutQuery, read
from cavesson.board.runs import Board
from cavesson.board.selection import RunQuery
from cavesson.errors import UserError
from cavesson.record.labels import BEST, Label, Name

MAX_NOTE = 10_000
MAX_NAME = 100
"""Characters of a tag, and of the name of an author."""


class LabelQuery(RolloutQuery):
    name: Name
    """star, rating, tag, note, or over: better than the rollout of the same step and prompt whose sample is value."""
    value: StrictInt | Annotated[str, StringConstraints(strict=True, max_length=MAX_NOTE)] | None = None
    """1 to 5 for a rating, a text for a tag or a note, a sample for over; none for a star."""
    author: str = Field("", max_length=MAX_NAME)
    """Who labels it."""
    removed: bool = False
    """Takes the label away."""

    @model_validator(mode="after")
    def _check(self) -> "LabelQuery":
        value = self.value
        if self.name == "star" and value is not None:
            raise ValueError("a star has no value")
        if self.name == "rating" and not (isinstance(value, int) and 1 <= value <= BEST):
            raise ValueError(f"a rating is a number from 1 to {BEST}")
        if self.name == "tag" and not (isinstance(value, str) and value.strip() and len(value) <= MAX_NAME):
            raise ValueError(f"a tag is a text of 1 to {MAX_NAME} characters")
        if self.name == "note" and not isinstance(value, str):
            raise ValueError("a note is a text")
        if self.name == "over" and (not isinstance(value, int) or value == self.sample):
            raise ValueError("over needs the sample of another rollout of the step")
        return self


def labels(board: Board, query: RunQuery) -> list[dict[str, Any]]:
    """Return every rollout with labels, and the labels, each with its author and time."""
    found = sorted(board.run(query.run).labels.all().items())
    return [
        {"step": step, "sample": sample, "labels": [label._asdict() for label in own.values()]}
        for (step, sample), own in found
    ]


def put(board: Board, query: LabelQuery) -> dict[str, Any]:
    """Label a rollout, change the label or take it away; return all labels of the rollout."""
    run = board.run(query.run)
    key = (query.step, query.sample)
    rollout = read(run, *key)
    if query.name == "over" and isinstance(query.value, int):
        other = read(run, query.step, query.value)
        if other.row["prompt"] != rollout.row["prompt"]:
            raise UserError(f"samples {query.sample} and {query.value} of step {query.step} answer different prompts")
    value = query.value.strip() if query.name == "tag" and isinstance(query.value, str) else query.value
    removed = query.removed or (query.name == "note" and value == "")
    run.labels.add(key, Label(query.name, value, query.author.strip()), removed)
    return {"step": query.step, "sample": query.sample, "labels": [label._asdict() for label in run.labels.of(key)]}
