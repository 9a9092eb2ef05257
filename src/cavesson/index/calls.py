"""The calls of tools of all rollouts, in the order of the rows: one raw file per column, mapped into memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.columns import Array, codes_of, write_at
from cavesson.index.folder import CALL_COLUMNS, State
from cavesson.index.maps import mapped
from cavesson.record.keys import rows_of_tokens

READ = ["step", "sample", "turn", "role", "name", "error", "seconds"]
"""The columns of the turns that the calls are made of."""
PORTION = 1 << 20
"""Calls that are looked at together, so that little memory is needed."""


class Calls(NamedTuple):
    """Calls of tools, in the order of their rows and turns."""

    row: Array
    """[C] the row that each belongs to, ascending."""
    tool: Array
    """[C] index of its tool among ``State.tools``."""
    failed: Array
    """[C] 1 if it failed, else 0."""
    seconds: Array
    """[C] how long it took; NaN if that is unknown."""

    def take(self, which: Array | slice) -> Self:
        """Return some of the calls."""
        return self._replace(**{name: values[which] for name, values in self._asdict().items()})

    def of(self, rows: Array) -> tuple[Array, Array]:
        """Return the first call of each row, and the end of its calls."""
        return np.searchsorted(self.row, rows), np.searchsorted(self.row, rows, side="right")

    def portions(self) -> Iterator[Self]:
        """Yield the calls in portions of about ``PORTION``, with the calls of a row together; at least one portion."""
        bounds = [*np.searchsorted(self.row, self.row[PORTION::PORTION]).tolist(), len(self.row)]
        for start, stop in zip([0, *bounds], bounds, strict=False):
            yield self.take(slice(start, stop))


def recorded(table: pa.Table, turns: pa.Table, names: list[str]) -> Calls:
    """Return the calls in a table of [N] rows, numbered by their index, from the columns ``READ`` of their turns.

    ``names`` are the tools so far; new ones are appended in place.
    """
    row, known = rows_of_tokens(table, turns)
    which = known & pc.fill_null(pc.equal(turns["role"], "tool"), False).to_numpy()
    row, lines = row[which], turns.filter(pa.array(which))
    order = np.lexsort((lines["turn"].to_numpy(), row))
    seconds = lines["seconds"].to_numpy(zero_copy_only=False).astype("<f4")
    failed = lines["error"].is_valid().to_numpy().astype(np.uint8)
    tool = codes_of(pc.fill_null(lines["name"], ""), names, 2**31)
    return Calls(row, tool, failed, seconds).take(order)


def append(folder: Path, state: State, calls: Calls, names: Sequence[str]) -> State:
    """Append calls, whose rows follow those of the state, and return the state that includes them."""
    for name, dtype in CALL_COLUMNS.items():
        write_at(folder / f"calls-{name}", state.calls, getattr(calls, name).astype(dtype))
    return state.with_(calls=state.calls + len(calls.row), tools=tuple(names))


def read(folder: Path, state: State) -> Calls:
    """Return all calls of a state."""
    return Calls(*(mapped(folder / f"calls-{name}", dtype, state.calls) for name, dtype in CALL_COLUMNS.items()))
