"""What the index held at one moment; it stays as it was while the index grows."""

from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa

from cavesson.index.columns import CODED, MISSING, Array
from cavesson.index.folder import State, metrics_name, read_state
from cavesson.index.maps import mapped, mapped_table
from cavesson.index.prompts import read_prompts


class Snapshot:
    """The rows of the index in the order in which they came, numbered from 0.

    Args:
        folder: Of the index.
        state: The state to read.
    """

    def __init__(self, folder: Path, state: State) -> None:
        self.folder = folder
        self.state = state
        self.rows = state.rows
        self._column: Callable[[str], Array] = lru_cache(None)(self._map)

    def only(self, rows: Array) -> "Snapshot":
        """Returns a snapshot of some of the rows, of which nothing but their numbers may be asked."""
        some = Snapshot(self.folder, self.state)
        some.rows = len(rows)
        some._column = lambda name: self.raw(name)[rows]
        return some

    @property
    def names(self) -> list[str]:
        """The columns with a measured number."""
        return [name for name in self.state.columns if name != "prompt"]

    @property
    def numbers(self) -> list[str]:
        """The columns of numbers, those of few texts left out."""
        return [name for name in self.names if name not in CODED]

    def column(self, name: str) -> Array:
        """Returns [rows] the numbers of a column; NaN where a number was not measured.

        Raises:
            KeyError: There is no such column.
        """
        values = self.raw(name)
        column = self.state.columns[name]
        if column.missing and values.dtype.kind == "i":
            return np.where(values == MISSING[column.dtype], np.nan, values)
        return values

    def raw(self, name: str) -> Array:
        """Returns [rows] the numbers as they are stored."""
        return self._column(name)

    def take(self, name: str, rows: Array) -> Array:
        """Returns the numbers of some rows, NaN for those not measured."""
        values = self.raw(name)[rows]
        column = self.state.columns[name]
        if column.missing and values.dtype.kind == "i":
            return np.where(values == MISSING[column.dtype], np.nan, values)
        return values

    @cached_property
    def alive(self) -> Array | None:
        """[rows] which rows are part of the run; None if all are."""
        if not self.state.dead:
            return None
        alive = np.ones(self.rows, np.bool_)
        alive[np.fromfile(self.folder / "dead", "<i4", self.state.dead)] = False
        return alive

    @cached_property
    def count(self) -> int:
        """Number of rollouts of the run."""
        return self.rows - self.state.dead

    @cached_property
    def metrics(self) -> pa.Table:
        """The logged metrics by step."""
        if not self.state.metrics:
            return pa.table({"step": pa.array([], pa.int32())})
        return mapped_table(self.folder / metrics_name(self.state.metrics))[0]

    @cached_property
    def prompts(self) -> Array:
        """[P] hash of each prompt by its number, equal for equal texts in all runs."""
        return read_prompts(self.folder, self.state.prompts)

    @cached_property
    def step_range(self) -> tuple[int, int]:
        """The first and the last step."""
        step = self.raw("step")
        return int(step.min()), int(step.max())

    def stored_order(self, name: str) -> Array | None:
        """Returns the first rows from the smallest number to the largest, as many as the index has sorted."""
        if name not in self.state.orders:
            return None
        return mapped(self.folder / self.state.orders[name], "<i4", self.state.ordered_rows)

    def _map(self, name: str) -> Array:
        column = self.state.columns[name]
        return mapped(self.folder / column.file, column.dtype, self.rows)


def snapshot(folder: Path) -> Snapshot:
    """Returns what the index holds now; nothing if there is no index yet."""
    return Snapshot(folder, read_state(folder) or State(run=""))
