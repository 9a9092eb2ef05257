"""The turns of some episodes as arrays: one value per turn, in the order of step, sample and turn."""

import re
from functools import cached_property

import numpy as np
import pyarrow as pa

from cavesson.doctor.rows import Rows, measured, numbers
from cavesson.doctor.series import Array, Series, mean_by_step, read_only
from cavesson.findings.finding import Evidence
from cavesson.record.keys import rows_of_tokens

LATE = re.compile(r"time[ds]?[ _-]?out|deadline|took (too long|longer)|returned nothing within", re.IGNORECASE)
"""How tools and clients say that an answer took too long."""


class Turns:
    """The turns of some rollouts; values that were not recorded are NaN or None."""

    def __init__(self, table: pa.Table, rows: Rows) -> None:
        """Wrap turns ordered by step, sample and turn.

        Args:
            table: the turns.
            rows: their rollouts, perhaps among others.
        """
        line, known = rows_of_tokens(rows.table, table)
        self._table = table if known.all() else table.filter(pa.array(known))
        self.rows = rows
        self.line = read_only(line[known])
        """[M] which rollout each turn is of, ascending"""

    def of(self, rows: Rows) -> "Turns":
        """Return the turns of some of the rollouts."""
        return Turns(self._table, rows)

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> Array:
        """Return a numeric column, [M] float64."""
        return numbers(self._table[name])

    def recorded(self, name: str) -> bool:
        """Return whether a column was recorded for any turn."""
        return bool(len(self)) and measured(self._table[name])

    def texts(self, name: str) -> list[str | None]:
        """Return a text column; None for turns without one."""
        found: list[str | None] = self._table[name].to_pylist()
        return found

    @cached_property
    def role(self) -> Array:
        """[M] who speaks"""
        return read_only(np.array(self.texts("role"), object))

    @cached_property
    def step(self) -> Array:
        """[M] the step of each turn"""
        return read_only(self.rows.step[self.line])

    @cached_property
    def calls(self) -> dict[str, Array]:
        """The turns of each tool by its name, as indices; a call that names no tool is not among them."""
        name = np.array([one or "" for one in self.texts("name")], object)
        of_tools = np.flatnonzero((self.role == "tool") & (name != ""))
        return {one: of_tools[name[of_tools] == one] for one in sorted(set(name[of_tools]))}

    @cached_property
    def failed(self) -> Array:
        """[M] whether a call has failed"""
        return read_only(self._table["error"].is_valid().to_numpy() & (self.role == "tool"))

    @cached_property
    def late(self) -> Array:
        """[M] whether a call has failed because it took too long"""
        pairs = zip(self.texts("error"), self.failed.tolist(), strict=True)
        return read_only(np.array([failed and LATE.search(error or "") is not None for error, failed in pairs], bool))

    @cached_property
    def last(self) -> Array:
        """[M] whether a turn is the last one of its episode"""
        return read_only(np.append(self.line[1:] != self.line[:-1], True)[: len(self)])

    @cached_property
    def spoken(self) -> list[list[str]]:
        """[n] for each rollout the texts of the policy's turns, in their order"""
        found: list[list[str]] = [[] for _ in range(len(self.rows))]
        for line, role, text in zip(self.line.tolist(), self.role.tolist(), self.texts("text"), strict=True):
            if role == "assistant":
                found[line].append(text or "")
        return found

    @cached_property
    def shape(self) -> Array:
        """[n] for each rollout the number of its kind: equal for episodes with the same speakers and tools in turn"""
        kinds: dict[tuple[tuple[str, str | None], ...], int] = {}
        spoken: list[list[tuple[str, str | None]]] = [[] for _ in range(len(self.rows))]
        for line, role, name in zip(self.line.tolist(), self.role.tolist(), self.texts("name"), strict=True):
            spoken[line].append((role, name))
        return read_only(np.array([kinds.setdefault(tuple(one), len(kinds)) for one in spoken], np.int64))

    def by_step(self, turns: Array, values: Array) -> Series:
        """Return the mean of values [M] over some turns, given by their indices, by step."""
        return mean_by_step(self.step[turns], values[turns].astype(float))

    def evidence(self, turns: Array) -> tuple[Evidence, ...]:
        """Return the first three of some turns, given by their indices, as evidence: their tokens, if known."""
        first, count = self["first_token"], self["tokens"]
        found = []
        for turn in turns[:3].tolist():
            (place,) = self.rows.evidence([self.line[turn]])
            known = np.isfinite(first[turn]) and count[turn] > 0
            start = int(first[turn]) if known else None
            found.append(
                Evidence(place.step, place.sample, start, start + int(count[turn]) if start is not None else None)
            )
        return tuple(found)
