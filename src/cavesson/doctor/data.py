"""What the rules read of a run: settings, metrics, rollouts, and the tokens of some of them."""

from collections.abc import Collection, Iterable
from copy import deepcopy
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.doctor.finding import Evidence
from cavesson.doctor.names import ALIASES
from cavesson.doctor.rows import Rows, numbers
from cavesson.doctor.rule import KINDS
from cavesson.doctor.sample import Sample, take_sample
from cavesson.doctor.series import Series, series
from cavesson.record import Run
from cavesson.record.schema import ROW_COLUMNS

HEAVY = frozenset(["prompt", "response", "prompt_ids", "ref_response", "ground_truth", "extra", "reward_parts"])
"""Columns that are read of the sample only."""


class RunData:
    """A run as the rules see it. Nothing is read before a rule asks for it, and each thing once."""

    def __init__(self, run: Run, sees: Collection[str] = KINDS) -> None:
        """Takes a run, and which kinds of data the rules may see."""
        self.run = run
        self.sees = frozenset(sees)

    @property
    def info(self) -> dict[str, Any]:
        """What run.json says; a copy, so that a rule that changes it does so for itself."""
        return deepcopy(self._info)

    @cached_property
    def _info(self) -> dict[str, Any]:
        return self.run.info if "info" in self.sees else {}

    @property
    def algorithm(self) -> str | None:
        """The name of the algorithm, where it is known."""
        name = self._info.get("algorithm")
        return name if isinstance(name, str) else None

    def setting(self, path: str, default: Any = None) -> Any:
        """Returns an entry of run.json by its dotted path, such as ``config.kl.coef``."""
        found: Any = self._info
        for key in path.split("."):
            if not isinstance(found, dict) or key not in found:
                return default
            found = found[key]
        return deepcopy(found)

    def has(self, need: str) -> bool:
        """Returns whether something was measured: ``rows.NAME``, ``tokens.NAME``, ``steps.METRIC`` or ``info.PATH``."""
        kind, _, name = need.partition(".")
        if kind not in self.sees:
            return False
        if kind == "info":
            return self.setting(name) is not None
        if kind == "steps" and name == "step":
            return bool(self._steps.num_rows)
        if kind == "steps":
            return len(self.metric(name)) > 0
        if kind == "tokens":
            return bool(len(self.rows)) and self.sample.has(name)
        if name in HEAVY:
            return bool(len(self.rows)) and self.sample.rows.has(name)
        return self.rows.has(name)

    @property
    def last_step(self) -> int | None:
        """The newest step with rollouts or metrics; None if there is none."""
        logged = self._steps["step"]
        found = [int(self.rows.steps[-1])] if len(self.rows) else []
        return max(found + ([logged[-1].as_py()] if len(logged) else []), default=None)

    @cached_property
    def _steps(self) -> pa.Table:
        return self.run.steps()

    @cached_property
    def metrics(self) -> list[str]:
        """The names of the logged metrics."""
        return [name for name in self._steps.column_names if name not in ("step", "attempt", "rank")]

    def metric(self, name: str) -> Series:
        """Returns a logged metric by step, under our name or another trainer's; empty where it was not logged."""
        for known in (name, *ALIASES.get(name, ())):
            if known in self._steps.column_names:
                return series(self._steps["step"].to_numpy(), numbers(self._steps[known]))
        return series(np.zeros(0), np.zeros(0))

    @cached_property
    def _rollouts(self) -> tuple[Rows, Rows]:
        """Those that were trained on, and the held-out ones."""
        table = self.run.rows([column.name for column in ROW_COLUMNS if column.name not in HEAVY])
        held_out = pc.fill_null(pc.equal(table["split"], "eval"), False)
        return Rows(table, pc.invert(held_out)), Rows(table, held_out)

    @property
    def rows(self) -> Rows:
        """The rollouts that were trained on, without their texts."""
        return self._rollouts[0]

    @property
    def evaluation(self) -> Rows:
        """The held-out rollouts, without their texts."""
        return self._rollouts[1]

    @cached_property
    def sample(self) -> Sample:
        """Some of the trained rollouts, with texts and tokens."""
        return take_sample(self.run, self.rows)

    def step_evidence(self, steps: Iterable[int | None]) -> tuple[Evidence, ...]:
        """Returns the first rollout of each of some steps as places to look at; None is no step."""
        at = [int(np.searchsorted(self.rows.step, step)) for step in steps if step is not None]
        return tuple(Evidence(int(self.rows.step[i]), int(self.rows.sample[i])) for i in at if i < len(self.rows))

    def rollout_evidence(self, numbers: Iterable[int], rows: Rows | None = None) -> tuple[Evidence, ...]:
        """Returns rollouts as places to look at, given by their numbers in ``rows``, or in the rows given."""
        of = self.rows if rows is None else rows
        return tuple(Evidence(int(of.step[i]), int(of.sample[i])) for i in numbers)

    def not_finite_metrics(self) -> list[tuple[int, str, int]]:
        """Returns first step, name and count of every metric that is NaN or infinite somewhere."""
        found = []
        for name in self.metrics:
            column = self._steps[name]
            values = numbers(column)
            bad = np.flatnonzero(~np.isfinite(values) & column.is_valid().to_numpy())
            if len(bad):
                found.append((int(self._steps["step"][int(bad[0])].as_py()), name, len(bad)))
        return found

    def not_finite_columns(self) -> list[tuple[int, str, int]]:
        """Returns first step, name and count of every column of the rollouts and tokens with such values."""
        if "rows" not in self.sees:
            return []
        lines = self.run.not_finite()
        lines = lines.filter(pc.invert(pc.fill_null(pc.equal(lines["split"], "eval"), False)))
        found = lines.group_by("column").aggregate([("step", "min"), ("not_finite", "sum")])
        return [(line["step_min"], line["column"], line["not_finite_sum"]) for line in found.to_pylist()]
