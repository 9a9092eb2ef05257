"""The roll-ups of every step in raw files, so that a chart of a column needs only the lines of that column.

Lines are only appended. When steps change, one line marks all earlier lines from a step on as invalid, and the current
lines of the record follow it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.index.columns import Array, codes_of, write_at
from cavesson.index.folder import State
from cavesson.index.maps import mapped
from cavesson.index.snapshot import Snapshot
from cavesson.record import Run
from cavesson.sorted_arrays import distinct
from cavesson.text.features import slices

Level = Literal["row", "token"]
LINE = np.dtype(
    [
        ("step", "<i4"), ("split", "u1"), ("column", "<u2"), ("count", "<i8"), ("sum", "<f8"), ("sum_squares", "<f8"),
        ("min", "<f8"), ("max", "<f8"), ("start", "<i8"), ("bins", "<i4"),
    ]
)  # fmt: skip
BINS = {
    "row": {"sketch_keys": "<i2", "sketch_counts": "<u4"},
    "token": {"bin_counts": "<u4", "bin_sums": "<f8"},
}
GONE = 0xFFFF
"""In place of a column: lines before this one, from its step on, no longer count."""
STEPS_AT_ONCE = 256


class Rollups(NamedTuple):
    """The roll-ups of one column, with one line per step and split, and the concatenated bins of the lines."""

    lines: Array
    """[L] of ``LINE``; ``split`` is the code as in the column of that name, 255 for none."""
    bins: dict[str, Array]
    """[N] ``sketch_keys`` and ``sketch_counts`` of rows, ``bin_counts`` and ``bin_sums`` of tokens."""

    @property
    def step(self) -> Array:
        """[L] the step of each line."""
        return np.ascontiguousarray(self.lines["step"])

    def of_bins(self, values: Array) -> Array:
        """Return [N] for each bin the value of its line, given the [L] values of the lines."""
        return np.repeat(values, self.lines["bins"])

    def only(self, wanted: Array) -> "Rollups":
        """Return the selected lines."""
        kept = self.of_bins(wanted)
        return Rollups(self.lines[wanted], {name: bins[kept] for name, bins in self.bins.items()})


def add_rollups(folder: Path, state: State, run: Run, first_step: int) -> State:
    """Return the state with the current roll-ups of the record for all steps from ``first_step`` on."""
    snapshot = Snapshot(folder, state)
    gone = np.zeros(1, LINE)
    gone["step"], gone["column"] = first_step, GONE
    for level in BINS:
        state = _append(folder, state, level, gone, [])
    step = snapshot.raw("step")
    steps = distinct(step[(step >= first_step) if snapshot.alive is None else (step >= first_step) & snapshot.alive])
    for start in range(0, len(steps), STEPS_AT_ONCE):
        table = run.rollups(steps=steps[start : start + STEPS_AT_ONCE].tolist())
        for level in BINS:
            state = _add(folder, state, level, table.filter(pc.field("level") == level))
    return state


def _add(folder: Path, state: State, level: str, table: pa.Table) -> State:
    codes = {name: list(values) for name, values in state.codes.items()}
    names, splits = list(state.rollup_columns), codes.setdefault("split", [])
    lines = np.zeros(table.num_rows, LINE)
    lines["column"] = codes_of(table["column"], names, GONE)
    lines["split"] = codes_of(table["split"], splits)
    for name in ("step", "count", "sum", "sum_squares", "min", "max"):
        lines[name] = table[name].to_numpy()
    bins = [table[name].combine_chunks() for name in BINS[level]]
    if table.num_rows:
        lines["bins"] = np.diff(bins[0].offsets.to_numpy())
    lines["start"] = state.rollups.get(level, (0, 0))[1] + np.cumsum(lines["bins"]) - lines["bins"]
    state = state.with_(codes=codes, rollup_columns=tuple(names))
    return _append(folder, state, level, lines, [column.flatten().to_numpy() for column in bins])


def _append(folder: Path, state: State, level: str, lines: Array, bins: Sequence[Array]) -> State:
    count, filled = state.rollups.get(level, (0, 0))
    write_at(folder / f"rollups-{level}", count, lines)
    for (name, dtype), values in zip(BINS[level].items(), bins, strict=False):
        write_at(folder / f"rollups-{name}", filled, values.astype(dtype))
    added = len(bins[0]) if bins else 0
    return state.with_(rollups={**state.rollups, level: (count + len(lines), filled + added)})


def rollups(snapshot: Snapshot, level: Level, column: str) -> Rollups:
    """Return the roll-ups of one column, without any lines if the column has none."""
    count, filled = snapshot.state.rollups.get(level, (0, 0))
    names = snapshot.state.rollup_columns
    lines = np.zeros(0, LINE)
    if count and column in names:
        everything = mapped(snapshot.folder / f"rollups-{level}", LINE, count)
        lines = everything[_current(everything, names.index(column))]
    place = slices(lines["start"], lines["bins"])
    bins = {
        name: mapped(snapshot.folder / f"rollups-{name}", dtype, filled)[place] if len(place) else place
        for name, dtype in BINS[level].items()
    }
    return Rollups(lines, bins)


def _current(lines: Array, column: int) -> Array:
    """Return the places of the lines of a column that no later line invalidates."""
    mine = np.flatnonzero(lines["column"] == column)
    gone = np.flatnonzero(lines["column"] == GONE)
    # The smallest step that any later line invalidates; the sentinel at the end invalidates nothing.
    smallest = np.append(np.minimum.accumulate(lines["step"][gone][::-1])[::-1], np.iinfo(np.int32).max)
    return mine[lines["step"][mine] < smallest[np.searchsorted(gone, mine)]]
