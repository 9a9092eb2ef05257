"""What a run knows of each of its prompts: how often it was answered, and what the responses earned."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cavesson.board.runs import OpenRun
from cavesson.index.columns import Array
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import Split
from cavesson.sorted_arrays import are_first

CHUNK = 1 << 20
"""Rows that are looked at together."""
VERDICT = 0.01
"""The highest reward is taken for a solution only if this share of the responses has it."""


class Visit(NamedTuple):
    """The first or the last step that has a scored response to each prompt."""

    step: Array
    """[P]; of prompts without one, before or after all steps."""
    total: Array
    """[P] sum of the rewards of this step."""
    scored: Array
    """[P] how many responses have one."""

    @property
    def mean(self) -> Array:
        """[P] mean reward of the step; NaN without a reward."""
        return _mean(self.total, self.scored)


class PromptTable(NamedTuple):
    """Statistics of the responses to each prompt in a split; prompts are in the order of their numbers in the index."""

    rows: int
    """Rows of the index that are counted."""
    n: Array
    """[P] responses."""
    scored: Array
    """[P] responses with a finite reward."""
    total: Array
    """[P] sum of the rewards."""
    best: Array
    """[P] highest reward; -inf without one."""
    newest: Array
    """[P] step of the newest response, times 2**32, plus its row; 0 without one."""
    first: Visit
    last: Visit

    @property
    def mean(self) -> Array:
        """[P] mean reward; NaN without a reward."""
        return _mean(self.total, self.scored)

    @property
    def change(self) -> Array:
        """[P] mean reward of the last step minus that of the first; NaN for prompts of a single step."""
        return np.where(self.last.step > self.first.step, self.last.mean - self.first.mean, np.nan)


def table_of(run: OpenRun, snapshot: Snapshot, split: Split) -> PromptTable:
    """Return the table of a split; of an index that has grown, only the new rows are counted."""

    def renewed(old: PromptTable | None) -> PromptTable:
        known = old if old is not None and old.rows <= snapshot.rows else _empty()
        return _grown(known, snapshot, split)

    return run.prompt_tables.latest("prompt table", (snapshot.state.dead, split), renewed)


def solved_from(run: OpenRun, snapshot: Snapshot, split: Split, table: PromptTable) -> float | None:
    """Return the highest reward if it can be a verdict: some responses have it, and not all of them; else None."""
    scored = int(table.scored.sum())
    if not scored:
        return None
    highest = float(table.best.max())
    count = int(solved(run, snapshot, split, highest).sum())
    return highest if VERDICT * scored <= count < scored else None


def solved(run: OpenRun, snapshot: Snapshot, split: Split, least: float) -> Array:
    """Return [P] how many responses to each prompt have at least a reward."""
    key = (snapshot.rows, snapshot.state.dead, split, least)
    return run.cache.get("solved", key, lambda: _solved(snapshot, split, least), most=6)


def _solved(snapshot: Snapshot, split: Split, least: float) -> Array:
    found = np.zeros(snapshot.state.prompts, np.int64)
    for rows, of in _chunks(snapshot, split, 0):
        reward = snapshot.raw("reward")[rows]
        found += np.bincount(of[np.isfinite(reward) & (reward >= least)], minlength=len(found))
    return found


def _chunks(snapshot: Snapshot, split: Split, first: int) -> Sequence[tuple[Array, Array]]:
    """Return rows of a split from ``first`` on, those that have a prompt, and the prompt of each."""
    if not snapshot.rows:
        return []
    prompt, mask = snapshot.raw("prompt"), snapshot.of(split)
    found = []
    for start in range(first, snapshot.rows, CHUNK):
        some = slice(start, start + CHUNK)
        kept = prompt[some] >= 0 if mask is None else (prompt[some] >= 0) & mask[some]
        rows = start + np.flatnonzero(kept)
        found.append((rows, prompt[rows]))
    return found


def _empty() -> PromptTable:
    nothing, numbers = np.empty(0, np.int64), np.empty(0)
    visit = Visit(np.empty(0, np.int32), numbers, nothing)
    return PromptTable(0, nothing, nothing, numbers, np.empty(0, np.float32), nothing, visit, visit)


def _grown(old: PromptTable, snapshot: Snapshot, split: Split) -> PromptTable:
    size, most = snapshot.state.prompts, np.iinfo(np.int32).max
    n, scored, total = (_longer(one, size, 0) for one in (old.n, old.scored, old.total))
    best, newest = _longer(old.best, size, -np.inf), _longer(old.newest, size, 0)
    first, last = _later(old.first, size, most), _later(old.last, size, -1)
    for rows, of in _chunks(snapshot, split, old.rows):
        group = _groups(rows, of, snapshot.raw("step")[rows], snapshot.raw("reward")[rows])
        n += np.bincount(group.of, group.n, size).astype(np.int64)
        np.maximum.at(newest, group.of, group.step.astype(np.int64) << 32 | group.newest)
        total += np.bincount(group.of, group.total, size)
        scored += np.bincount(group.of, group.scored, size).astype(np.int64)
        # The dtype of the column makes np.maximum.at many times as fast.
        np.maximum.at(best, group.of, group.best)
        _visit(first, np.minimum, group)
        _visit(last, np.maximum, group)
    return PromptTable(snapshot.rows, n, scored, total, best, newest, first, last)


def _longer(values: Array, size: int, fill: float) -> Array:
    return np.concatenate([values, np.full(size - len(values), fill, values.dtype)])


def _later(visit: Visit, size: int, step: int) -> Visit:
    return Visit(_longer(visit.step, size, step), _longer(visit.total, size, 0), _longer(visit.scored, size, 0))


class _Groups(NamedTuple):
    """Adjacent responses to one prompt in one step, which are nearly always recorded together: [G] for each group."""

    of: Array
    step: Array
    n: Array
    newest: Array
    scored: Array
    total: Array
    best: Array


def _groups(rows: Array, of: Array, step: Array, reward: Array) -> _Groups:
    start = np.flatnonzero(are_first(of) | are_first(step))
    if not len(start):
        return _Groups(of, step, rows, rows, rows, reward, reward)
    stop, there = np.append(start[1:], len(of)), np.isfinite(reward)
    scored = np.add.reduceat(there, start, dtype=np.int64)
    total = np.add.reduceat(np.where(there, reward, 0), start, dtype=np.float64)
    best = np.maximum.reduceat(np.where(there, reward, np.float32(-np.inf)), start)
    return _Groups(of[start], step[start], stop - start, rows[stop - 1], scored, total, best)


def _visit(visit: Visit, nearer: Any, group: _Groups) -> None:
    """Count scored responses in place; ``nearer`` is the function that chooses between two steps."""
    there = group.scored > 0
    of, step, size = group.of[there], group.step[there], len(visit.step)
    before = visit.step.copy()
    nearer.at(visit.step, of, step)
    moved = visit.step != before
    visit.total[moved], visit.scored[moved] = 0, 0
    here = step == visit.step[of]
    visit.total[:] += np.bincount(of[here], group.total[there][here], size)
    visit.scored[:] += np.bincount(of[here], group.scored[there][here], size).astype(np.int64)


def _mean(total: Array, count: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.asarray(total / count)
