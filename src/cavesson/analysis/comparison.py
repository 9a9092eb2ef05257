"""The last metrics of two runs side by side."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cavesson.notebook import grid, printed
from cavesson.record import Run
from cavesson.record.read.show import show_answer
from cavesson.record.schema import STEP_COLUMNS


@dataclass(frozen=True, repr=False)
class MetricComparison:
    """Metrics of two runs; a notebook and a prompt display them as a table."""

    run: str
    """Folder of the first run."""
    other: str
    """Folder of the other run."""
    table: pa.Table
    """Columns ``metric``, ``run``, ``other``, and ``difference``, by which the other is higher; null if a run has no
    such metric."""

    @property
    def _heads(self) -> list[str]:
        return ["metric", self.run, self.other, "difference"]

    def _rows(self) -> list[list[object]]:
        return [list(row.values()) for row in self.table.to_pylist()]

    def __repr__(self) -> str:
        return printed(lambda console: show_answer(self._heads, self._rows(), console)).rstrip()

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return grid(self._heads, self._rows())


def compared(run: Run, other: Run, last: int) -> MetricComparison:
    """Compare the means of the last ``last`` values of each metric of two runs."""
    first, second = _last(run, last), _last(other, last)
    names = list(dict.fromkeys([*first, *second]))
    lines = [(name, a := first.get(name), b := second.get(name), _difference(a, b)) for name in names]
    columns = zip(*lines, strict=True) if lines else ((), (), (), ())
    types = (pa.string(), pa.float64(), pa.float64(), pa.float64())
    arrays = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    return MetricComparison(run.folder, other.folder, pa.table(arrays, ["metric", "run", "other", "difference"]))


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b - a


def _last(run: Run, last: int) -> dict[str, float]:
    """Return the mean of the last values of each metric; a metric that is not measured in each step has fewer steps."""
    table = run.steps()
    declared = {column.name for column in STEP_COLUMNS}
    values = {name: table[name].drop_null().to_numpy() for name in table.column_names if name not in declared}
    return {name: float(np.mean(measured[-last:])) for name, measured in values.items()}
