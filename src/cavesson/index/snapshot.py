"""The content of the index at one moment, which does not change while the index grows."""

from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from cavesson.index import calls
from cavesson.index.columns import CODED, MISSING, Array
from cavesson.index.folder import State, metrics_name, read_state
from cavesson.index.maps import mapped, mapped_table
from cavesson.index.prompts import read_prompts
from cavesson.record.read.changes import attempts_in
from cavesson.record.splits import GIVEN, HELD_OUT, Split


class Snapshot:
    """The rows of the index in the order in which they were added, numbered from 0, as of a state."""

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        self.rows = state.rows
        self._within: tuple[Snapshot, Array] | None = None
        self._columns: dict[str, Array] = {}
        self._masks: dict[Split, Array | None] = {}

    def only(self, rows: Array) -> "Snapshot":
        """Return a snapshot of some of the rows, of which only the columns can be read."""
        some = Snapshot(self.folder, self.state)
        some.rows = len(rows)
        some._within = self, rows
        return some

    @property
    def names(self) -> list[str]:
        """The names of the columns that have a measured value."""
        return [name for name in self.state.columns if name != "prompt"]

    @property
    def numbers(self) -> list[str]:
        """The names of the numeric columns, without the coded text columns."""
        return [name for name in self.names if name not in CODED]

    def column(self, name: str) -> Array:
        """Return [rows] the values of a column, which must exist; NaN for values that were not measured."""
        return self._measured(name, self.raw(name))

    def raw(self, name: str) -> Array:
        """Return [rows] the values as they are stored."""
        if self._within is not None:
            whole, rows = self._within
            return whole.raw(name)[rows]
        if name not in self._columns:
            self._columns[name] = self._map(name)
        return self._columns[name]

    def take(self, name: str, rows: Array) -> Array:
        """Return the values of some rows, NaN for those that were not measured."""
        return self._measured(name, self.raw(name)[rows])

    def keys(self, rows: Array) -> list[tuple[int, int]]:
        """Return the step and sample of some rows."""
        return list(zip(self.raw("step")[rows].tolist(), self.raw("sample")[rows].tolist(), strict=True))

    def _measured(self, name: str, values: Array) -> Array:
        """Return stored values of a column with NaN for those that were not measured."""
        column = self.state.columns[name]
        if column.missing and values.dtype.kind == "i":
            return np.where(values == MISSING[column.dtype], np.nan, values)
        return values

    @cached_property
    def calls(self) -> calls.Calls:
        """The calls of tools of all rows."""
        return calls.read(self.folder, self.state)

    @cached_property
    def alive(self) -> Array | None:
        """[rows] whether each row is part of the run; None if all are."""
        if not self.state.dead:
            return None
        alive = np.ones(self.rows, np.bool_)
        alive[np.fromfile(self.folder / "dead", "<i4", self.state.dead)] = False
        return alive

    @cached_property
    def held_out(self) -> Array | None:
        """[rows] whether each row is a response to a held-out prompt; None if none is."""
        return self._has_split(HELD_OUT)

    @cached_property
    def given(self) -> Array | None:
        """[rows] whether the data give the response of each row; None if they give none."""
        return self._has_split(GIVEN)

    def _has_split(self, split: Split) -> Array | None:
        known = self.state.codes.get("split", [])
        if split not in known or "split" not in self.state.columns:
            return None
        return np.asarray(self.raw("split") == known.index(split))

    def of(self, split: Split | None) -> Array | None:
        """Return [rows] which rows are part of the run and of a split, None for both; None if all are."""
        if split is None:
            return self.alive
        if split not in self._masks:
            self._masks[split] = self._mask_of(split)
        return self._masks[split]

    def _mask_of(self, split: Split) -> Array | None:
        apart = {HELD_OUT: self.held_out, GIVEN: self.given}
        masks = [] if self.alive is None else [self.alive]
        if split in apart:
            mine = apart[split]
            masks.append(np.zeros(self.rows, np.bool_) if mine is None else mine)
        else:
            masks += [~others for others in apart.values() if others is not None]
        return np.logical_and.reduce(masks) if masks else None

    def count(self, split: Split) -> int:
        """Return the number of rollouts of a split in the run."""
        mask = self.of(split)
        return self.rows if mask is None else int(np.count_nonzero(mask))

    @cached_property
    def attempts(self) -> int:
        """The number of times that the run was started or resumed."""
        return len(attempts_in(self.state.cursor))

    @cached_property
    def metrics(self) -> pa.Table:
        """The logged metrics by step."""
        if not self.state.metrics:
            return pa.table({"step": pa.array([], pa.int32())})
        return mapped_table(self.folder / metrics_name(self.state.metrics))[0]

    @cached_property
    def prompts(self) -> Array:
        """[P] hash of each prompt, indexed by its number; equal texts have equal hashes in all runs."""
        return read_prompts(self.folder, self.state.prompts)

    @cached_property
    def step_range(self) -> tuple[int, int]:
        """The first and the last step of all rows, superseded ones included."""
        step = self.raw("step")
        return int(step.min()), int(step.max())

    @cached_property
    def live_step_range(self) -> tuple[int, int] | None:
        """The first and the last step of the rows that are part of the run; None without any."""
        if self.alive is None:
            return self.step_range if self.rows else None
        step = self.raw("step")[self.alive]
        return (int(step.min()), int(step.max())) if len(step) else None

    def stored_order(self, name: str) -> Array | None:
        """Return the order of the rows that the index has sorted by a column; None if it has not sorted any."""
        if name not in self.state.orders:
            return None
        return mapped(self.folder / self.state.orders[name], "<i4", self.state.ordered_rows)

    def _map(self, name: str) -> Array:
        column = self.state.columns[name]
        return mapped(self.folder / column.file, column.dtype, self.rows)


def snapshot(folder: Path) -> Snapshot:
    """Return the current content of the index, which is empty if there is no index yet."""
    return Snapshot(folder, read_state(folder) or State(run=""))
