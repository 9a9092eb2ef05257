"""The rollouts that a request selects, and their order."""

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow.compute as pc
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from cavesson.board.expressions import compiled
from cavesson.board.names import MAX_NAME
from cavesson.board.runs import OpenRun, reading
from cavesson.errors import UserError
from cavesson.index.columns import Array
from cavesson.index.filters import matches, names_in
from cavesson.index.labels import LABELS, LabelColumns
from cavesson.index.orders import order, places
from cavesson.index.row_texts import RecordedTexts
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import Split

CHUNK = 65_536
"""Rows that are looked at together."""


def _steps(value: Any) -> Any:
    if not isinstance(value, str) or not value:
        return None
    first, _, last = value.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal() and len(value) <= 30):
        raise ValueError("write steps as 12 or 10-20")
    return int(first), int(last or first)


Steps = Annotated[
    tuple[int, int] | None,
    BeforeValidator(_steps),
    WithJsonSchema({"type": "string", "pattern": r"^([0-9]{1,9}(-[0-9]{1,9})?)?$"}),
]


class Query(BaseModel):
    """Parameters of a request, from its path and its query string."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True)


class NoQuery(Query):
    """Of a request without parameters."""


class RunQuery(Query):
    run: str = Field(max_length=MAX_NAME)
    """Name of the run on the board."""


class SplitQuery(RunQuery):
    split: Split = "train"
    """Rollouts that were trained on, or eval for held-out ones."""


class Selection(SplitQuery):
    steps: Steps = None
    """First and last step, such as 10-20; all of them if empty."""
    filter: str = Field("", max_length=2_000)
    """Condition on the columns, such as reward > 2 and length < 100. One on the column split replaces split."""
    q: str = Field("", max_length=1_000)
    """Text that the response contains, ignoring case; or a regular expression."""
    regex: bool = False
    """Whether q is a regular expression (RE2)."""
    within: Literal["response", "prompt", "ground_truth", "reasons"] = "response"
    """Where q is searched for: in responses and their turns, in prompts, right answers, or reasons of rewards."""
    starred: bool = False
    """Only rollouts with a star."""

    @property
    def splits(self) -> Split | None:
        """The split that is selected; None for both, from which a filter on the split chooses."""
        return None if "split" in names_in(self.filter) else self.split

    @property
    def text(self) -> str:
        """What is searched for: spaces around a text have no effect, those of an expression do."""
        return self.q if self.regex else self.q.strip()


class Page(Query):
    offset: int = Field(0, ge=0, le=2**31)
    """Number of rollouts to skip."""
    limit: int = Field(50, ge=1, le=500)
    """Maximum number of rollouts."""


def selected(run: OpenRun, snapshot: Snapshot, query: Selection) -> Array | None:
    """Return [rows] which rows are selected; None means all."""
    by_labels = not names_in(query.filter).isdisjoint(LABELS)
    version = run.labels.version() if by_labels else None
    key = (snapshot.state.rows, snapshot.state.dead, version, query.splits, query.steps, query.filter)
    mask = run.cache.get("selected", key, lambda: _mask(run, snapshot, query), most=4)
    if query.text and query.within != "response":
        mask = both(mask, _within(run, snapshot, query))
    if query.starred:
        mask = both(mask, LabelColumns(snapshot, run.labels.all()).flag("starred"))
    return mask


def _mask(run: OpenRun, snapshot: Snapshot, query: Selection) -> Array | None:
    mask = base(snapshot, query)
    if query.filter.strip():
        with reading():
            rows = None if mask is None or query.steps is None else np.flatnonzero(mask)
            found = matches(query.filter, snapshot, run.record, rows, run.labels.all())
        if rows is None:
            return both(mask, found)
        mask = np.zeros(snapshot.rows, np.bool_)
        mask[rows[found]] = True
    return mask


def _within(run: OpenRun, snapshot: Snapshot, query: Selection) -> Array:
    """Return [rows] which rows of the splits and steps have a text in what is recorded with their responses."""
    key = (snapshot.state.rows, snapshot.state.dead, query.splits, query.steps, query.text, query.regex, query.within)
    return run.cache.get("within", key, lambda: _reading_within(run, snapshot, query), most=4)


def _reading_within(run: OpenRun, snapshot: Snapshot, query: Selection) -> Array:
    pattern = compiled(query.text, query.regex)
    mask = base(snapshot, query)
    rows = np.arange(snapshot.rows) if mask is None else np.flatnonzero(mask)
    found = np.zeros(snapshot.rows, np.bool_)
    texts = RecordedTexts(snapshot, run.record, rows)
    with reading():
        found[rows] = texts.where(
            query.within, [], lambda some: pc.match_substring_regex(some, pattern), narrow=False, only=None
        )
    return found


def base(snapshot: Snapshot, query: Selection) -> Array | None:
    """Return [rows] which rows are of the splits and steps of a selection, whatever it asks of them; None means all."""
    mask = snapshot.of(query.splits)
    if query.steps is None:
        return mask
    step = snapshot.raw("step") if snapshot.rows else np.empty(0)
    return both(mask, (step >= query.steps[0]) & (step <= query.steps[1]))


def both(first: Array | None, second: Array) -> Array:
    """Return the intersection of two masks; None means all rows."""
    return second if first is None else first & second


def column_of(snapshot: Snapshot, name: str) -> Array:
    """Return [rows] a numeric column by its name, or raise a UserError that there is none."""
    if not snapshot.rows:
        raise UserError("nothing is indexed yet: the run has just been opened, or has no rollouts")
    if name not in snapshot.numbers:
        raise UserError(f"there is no column {name[:100]!r}; columns are {', '.join(snapshot.numbers)}")
    return snapshot.column(name)


def order_of(run: OpenRun, snapshot: Snapshot, sort: str) -> "Order":
    """Return all rows in the order of ``sort``: the name of a column, with the prefix - for descending order."""
    name = sort.removeprefix("-")
    if not snapshot.rows:
        return Order(np.empty(0, np.int32), 0, down=False)
    values = column_of(snapshot, name)
    key = (snapshot.rows, name)
    rows = run.cache.get("order", key, lambda: order(snapshot, name), most=6)
    measured = run.cache.get("measured", key, lambda: len(values) - int(np.count_nonzero(np.isnan(values))), most=200)
    return Order(rows, measured, sort.startswith("-"))


class Step(NamedTuple):
    """The rows of one step, by sample, and the rows directly before and after them, None at the ends of the run."""

    rows: Array
    before: int | None
    behind: int | None


def step_of(run: OpenRun, snapshot: Snapshot, step: int, split: Split | None) -> Step:
    """Return the rows of a step and split and their neighbours in the order of step and sample.

    Neighbours are of the same split, or of any if it is None; superseded rows are left out.
    """
    if not snapshot.rows:
        return Step(np.empty(0, np.int64), None, None)
    rows = order_of(run, snapshot, "step").rows
    first, stop = places(snapshot.raw("step"), rows, np.array([step, step + 1]), "left").tolist()
    within, mask = rows[first:stop], snapshot.of(split)
    if mask is not None:
        within = within[mask[within]]
    return Step(within, _first(rows[:first][::-1], mask), _first(rows[stop:], mask))


def _first(rows: Array, mask: Array | None) -> int | None:
    """Return the first of some rows that a mask keeps."""
    for start in range(0, len(rows), CHUNK):
        chunk = rows[start : start + CHUNK]
        kept = chunk if mask is None else chunk[mask[chunk]]
        if len(kept):
            return int(kept[0])
    return None


class Order(NamedTuple):
    """Rows by ascending value; the first ``measured`` have a value. In descending order, these come first as well."""

    rows: Array
    measured: int
    down: bool

    def chunks(self, size: int = CHUNK) -> list[Array]:
        """Return the rows in order, as views of at most ``size`` rows."""
        up = [self.rows[i : min(i + size, self.measured)] for i in range(0, self.measured, size)]
        rest = [self.rows[i : i + size] for i in range(self.measured, len(self.rows), size)]
        return [chunk[::-1] for chunk in reversed(up)] + rest if self.down else up + rest


def page_of(order: Order, mask: Array | None, offset: int, limit: int) -> tuple[int, Array]:
    """Return the number of rows that ``mask`` keeps, and ``limit`` of them from ``offset`` on, in order.

    The rows are counted from the nearer end, so that a scroll bar can jump anywhere in millions of them.
    """
    total = len(order.rows) if mask is None else int(np.count_nonzero(mask))
    stop = min(offset + limit, total)
    if offset >= stop:
        return total, np.empty(0, np.int32)
    chunks = order.chunks()
    if offset <= total - stop:
        return total, _matching(chunks, mask, offset, stop)
    backwards = [chunk[::-1] for chunk in reversed(chunks)]
    return total, _matching(backwards, mask, total - stop, total - offset)[::-1]


def place_of(order: Order, mask: Array | None, rows: Array) -> int | None:
    """Return how many rows that ``mask`` keeps come before the first of ``rows``; None if it keeps none of them."""
    before = 0
    for chunk in order.chunks():
        kept = chunk if mask is None else chunk[mask[chunk]]
        found = np.flatnonzero(np.isin(kept, rows))
        if len(found):
            return before + int(found[0])
        before += len(kept)
    return None


def first_of(order: Order, mask: Array, limit: int) -> Array:
    """Return the first rows in order that ``mask`` keeps, at most ``limit``."""
    return _matching(order.chunks(), mask, 0, limit)


def _matching(chunks: list[Array], mask: Array | None, start: int, stop: int) -> Array:
    """Return the rows from ``start`` to ``stop`` among those that ``mask`` keeps."""
    found, before = [], 0
    for chunk in chunks:
        kept = chunk if mask is None else chunk[mask[chunk]]
        if before + len(kept) > start:
            found.append(kept[max(start - before, 0) : stop - before])
        before += len(kept)
        if before >= stop:
            break
    return np.concatenate(found or [np.empty(0, np.int32)])
