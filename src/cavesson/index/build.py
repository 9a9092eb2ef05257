"""Keeps the index of a run up to date: first the numbers of new rollouts, then their words, then the sorted orders."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.index import calls, texts, turns
from cavesson.index.columns import KEY, READ, Array, append, arrays, mark_dead
from cavesson.index.folder import State, clear, read_state, sweep, write_state
from cavesson.index.metrics import add_metrics
from cavesson.index.orders import due, store_orders
from cavesson.index.prompts import Prompts
from cavesson.index.rescored import add_rescored
from cavesson.index.rollups import add_rollups
from cavesson.index.snapshot import Snapshot
from cavesson.index.text import TextBuilder
from cavesson.record import Run
from cavesson.record.read.changes import Changes
from cavesson.record.read.index_folder import fingerprint
from cavesson.record.segments import live_segments

BATCH = 100_000
"""Rollouts that are read and added together."""


class Builder:
    """Writes the index of one run. There is only one builder per index at a time (see ``only_writer``)."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run = run
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        state = read_state(folder)
        if state is None or state.run != fingerprint(run):
            clear(folder)
            state = State(run=fingerprint(run))
        self.state = state

    @cached_property
    def prompts(self) -> Prompts:
        """The numbering of the prompts."""
        return Prompts(self.folder, self.state.prompts)

    @cached_property
    def text(self) -> TextBuilder:
        """The builder that indexes words. It loads all features, so it is created only when needed."""
        return TextBuilder(self.run, self.folder, self.state)

    def update(self) -> bool:
        """Add the metrics and rollouts that are in the record but not in the index.

        New rollouts are appended after all others, whatever their step. Rollouts of a superseded attempt stay and are
        marked as dead, so a reader sees a consistent state of the index, however long it reads.

        Returns:
            Whether anything changed.
        """
        while True:
            found = live_segments(self.run.storage)
            changes = self.run.changes(self.state.cursor)
            try:
                state = add_metrics(self.folder, self.state, self.run)
                if changes.first_step is None:
                    state = add_rescored(self.folder, state, self.run)
                if state is self.state and changes.first_step is None:
                    return False
                self._commit(state)
                if changes.first_step is not None:
                    self._add(changes, changes.first_step)
                    self._commit(add_rescored(self.folder, self.state, self.run))
            except FileNotFoundError as error:
                if live_segments(self.run.storage) == found:
                    raise UserError(f"the record in {self.run.folder} lacks a file: {error}") from error
                continue  # a compaction replaced files in the meantime: their content is in other files now
            return True

    def advance(self) -> bool:
        """Do the next piece of the work that remains once all rollouts are added; return whether there was any."""
        if due(self.state):
            self._commit(store_orders(self.folder, self.state))
            return True
        try:
            if texts.due(self.state):
                self._commit(texts.store_texts(self.folder, self.state, self.run))
                return True
            if turns.due(self.state):
                self._commit(turns.store_turns(self.folder, self.state, self.run))
                return True
            if self.state.text_rows < self.state.rows:
                self._commit(self.text.advance(self.state))
                sweep(self.folder, self.state)
                return True
        except UserError:
            # The run has been started again in the meantime, which superseded some of these rollouts.
            if not self.update():
                raise
            return True
        return False

    def _add(self, changes: Changes, first_step: int) -> None:
        had = self._known(first_step)
        new_rows = max(0, self._recorded(changes, first_step) - len(had))
        self._commit(self.state.with_(recorded=self.state.rows + new_rows))
        seen = np.zeros(len(had), np.bool_)
        for table, said in self._batches(changes, first_step):
            codes = {name: list(values) for name, values in self.state.codes.items()}
            columns = arrays(table, codes)
            keys = _keys(columns)
            seen |= np.isin(had["key"], keys) if len(had) else seen
            new = np.flatnonzero(~np.isin(keys, had["key"])) if len(had) else np.arange(len(keys))
            if len(new):
                order = new[np.lexsort((columns["sample"][new], columns["step"][new]))]
                columns = {name: values[order] for name, values in columns.items()}
                columns["prompt"] = self.prompts.numbers(columns["prompt"])
                state = self._with_calls(table, said, order).with_(codes=codes, prompts=self.prompts.count)
                self._commit(append(self.folder, state, columns, len(order)))
        gone = had["row"][~seen]
        state = mark_dead(self.folder, self.state, gone) if len(gone) else self.state
        if len(gone) and state.pieces:
            state = self.text.recount(state)
        if state.rows:
            state = add_rollups(self.folder, state, self.run, first_step)
        self._commit(state.with_(cursor=changes.cursor, recorded=state.rows))

    def _with_calls(self, table: pa.Table, said: pa.Table, order: Array) -> State:
        """Return the state with the calls of the rows that will be appended, in this order."""
        if not len(said):
            return self.state
        names = list(self.state.tools)
        found = calls.recorded(table, said, names)
        row = np.full(len(table), -1)
        row[order] = self.state.rows + np.arange(len(order))
        found = found._replace(row=row[found.row])
        kept = np.flatnonzero(found.row >= 0)
        kept = kept[np.argsort(found.row[kept], kind="stable")]
        return calls.append(self.folder, self.state, found.take(kept), names) if len(kept) else self.state

    def _recorded(self, changes: Changes, first_step: int) -> int:
        """Return the number of rollouts in the record from a step on."""
        segments = [segment for segment in changes.segments if segment.stop > first_step]
        steps = [
            self.run.read(segment, "rows", ["step"]).filter(pc.field("step") >= first_step) for segment in segments
        ]
        return sum(table.num_rows for table in steps)

    def _known(self, first_step: int) -> Array:
        """Return the key and row number of each live rollout in the index from ``first_step`` on."""
        snapshot = Snapshot(self.folder, self.state)
        if not snapshot.rows:
            return np.empty(0, [("key", "V16"), ("row", "<i4")])
        which = snapshot.raw("step") >= first_step
        if snapshot.alive is not None:
            which &= snapshot.alive
        rows = np.flatnonzero(which)
        known = np.empty(len(rows), [("key", "V16"), ("row", "<i4")])
        known["key"], known["row"] = _keys({name: snapshot.raw(name)[rows] for name in KEY}), rows
        return known

    def _batches(self, changes: Changes, first_step: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield rows and turns from the first changed step on, with segments batched so that there are many rows."""
        tables: list[tuple[pa.Table, pa.Table]] = []
        for segment in changes.segments:
            if segment.stop > first_step:
                pair = self.run.read(segment, "rows", READ), self.run.read(segment, "turns", calls.READ)
                tables.append((_from(pair[0], first_step), _from(pair[1], first_step)))
            if sum(rows.num_rows for rows, _ in tables) >= BATCH:
                yield _concatenated(tables)
                tables = []
        if tables:
            yield _concatenated(tables)

    def _commit(self, state: State) -> None:
        write_state(self.folder, state)
        self.state = state


def _from(table: pa.Table, first_step: int) -> pa.Table:
    return table.filter(pc.field("step") >= first_step)


def _concatenated(tables: list[tuple[pa.Table, pa.Table]]) -> tuple[pa.Table, pa.Table]:
    rows, turns = zip(*tables, strict=True)
    return pa.concat_tables(rows), pa.concat_tables(turns)


def _keys(columns: dict[str, Array]) -> Array:
    """Return [N] one value per rollout; two rollouts have equal values if they are the same."""
    keys = np.empty(len(columns["step"]), [("step", "<i4"), ("sample", "<i4"), ("attempt", "<i4"), ("reward", "<f4")])
    for name in KEY:
        keys[name] = columns[name]
    return keys.view("V16")
