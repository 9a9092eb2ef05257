"""Rollouts as arrays: one value per rollout and column, in the order of step and sample."""

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.doctor.series import Array, Series, read_only, series
from cavesson.findings.finding import Evidence
from cavesson.sorted_arrays import are_first
from cavesson.text.words import words

SHOWN = 3
"""Rollouts that are evidence of a finding."""
Lookup = Callable[[str], Callable[[Any], Any] | None]
"""From the name of a column to the function that computes it."""


def nothing(name: str) -> None:
    """Derive nothing."""


class Rows:
    """Some rollouts; values that were neither recorded nor derived are NaN."""

    _whole: "Rows | None" = None
    """The rows of which these are the last ones."""

    def __init__(
        self,
        table: pa.Table,
        kept: pa.ChunkedArray | None = None,
        derived: Lookup = nothing,
        cut: dict[str, list[str]] | None = None,
    ) -> None:
        """Wrap rows ordered by step and sample. Columns are copied only when used.

        Args:
            table: the rows.
            kept: selects some of them.
            derived: returns a function that computes a column that was not recorded from these rows, by its name; None
                if it cannot be derived.
            cut: words of texts that were cut before; those of other texts are added.
        """
        self._table, self._kept, self._derived = table, kept, derived
        self._cut = {} if cut is None else cut
        self._numbers: dict[str, Array] = {}  # of derived columns
        self._means: dict[str, Series] = {}
        self._as_recorded: dict[str, Array] = {}
        self._is_recorded: dict[str, bool] = {}

    def __len__(self) -> int:
        return len(self.step)

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column as it was recorded; derived if it was not."""
        compute = None if self.recorded(name) else self._derived(name)
        if compute is not None:
            return pa.chunked_array([pa.array(compute(self), from_pandas=True)])
        return self._recorded(name)

    def _recorded(self, name: str) -> pa.ChunkedArray:
        column = self._table[name]
        return column if self._kept is None else column.filter(self._kept)

    def __getitem__(self, name: str) -> Array:
        """Return a numeric column, [n] float64."""
        if self.recorded(name) or self._derived(name) is None:
            return self._recorded_numbers(name)
        if name not in self._numbers:
            self._numbers[name] = read_only(numbers(self.column(name)))
        return self._numbers[name]

    def _recorded_numbers(self, name: str) -> Array:
        """Return a column as it was recorded, [n] float64; the last rows of others share theirs."""
        if name not in self._as_recorded:
            if name not in self._table.column_names:
                found = np.full(len(self), np.nan)
            elif self._whole is None:
                found = numbers(self._recorded(name))
            else:
                found = self._whole._recorded_numbers(name)
                found = found[len(found) - len(self) :]
            self._as_recorded[name] = read_only(found)
        return self._as_recorded[name]

    def texts(self, name: str) -> list[str | None]:
        """Return a text column; None for rollouts without a text."""
        found: list[str | None] = self.column(name).to_pylist()
        return found

    def words(self, name: str) -> list[list[str]]:
        """Return the words of a text column; none for rollouts without a text."""
        return self.cut([text or "" for text in self.texts(name)])

    def cut(self, texts: list[str]) -> list[list[str]]:
        """Return the words of some texts; each text is cut once for these rollouts and all that come from them."""
        new = list(set(texts) - self._cut.keys())
        self._cut.update(zip(new, words(new), strict=True))
        return [self._cut[text] for text in texts]

    def with_texts(self, name: str, texts: list[str | None]) -> "Rows":
        """Return the same rollouts with other values of a text column, [n]."""
        table = self.table
        column = pa.chunked_array([pa.array(texts, pa.string())])
        return Rows(table.set_column(table.column_names.index(name), name, column), None, self._derived, self._cut)

    def says(self, name: str, text: str) -> Array:
        """Return [n] whether a text column equals ``text``."""
        same = pc.fill_null(pc.equal(self.column(name), text), False)
        return np.asarray(same.to_numpy())

    def has(self, name: str) -> bool:
        """Return whether a column was recorded for any rollout, or can be derived."""
        return self.recorded(name) or self._derived(name) is not None

    def recorded(self, name: str) -> bool:
        """Return whether a column was recorded for any rollout."""
        if name not in self._is_recorded:
            there = name in self._table.column_names and self._is_measured(name)
            self._is_recorded[name] = there and not self._is_left_out(name)
        return self._is_recorded[name]

    def _is_measured(self, name: str) -> bool:
        """Return whether a column has any value that is not null, NaN or infinite."""
        if self._whole is not None and not self._whole.recorded(name):
            return False
        if _is_numeric(self._table.schema.field(name).type):
            return bool(np.isfinite(self._recorded_numbers(name)).any())
        return measured(self._recorded(name))

    def _is_left_out(self, name: str) -> bool:
        """Return whether a log of token ids has no texts: all are empty, although there are tokens."""
        if name == "response":
            has_tokens = bool(np.any(self["length"] > 1))  # an empty response may still have an end token
        elif name == "prompt":
            has_tokens = self.recorded("prompt_ids")
        else:
            return False
        return has_tokens and not pc.any(pc.greater(pc.utf8_length(self._recorded(name)), 0)).as_py()

    @cached_property
    def reward_parts(self) -> dict[str, Array]:
        """The parts of the reward by their names, [n] each, NaN where a response does not have one."""
        maps = self.column("reward_parts").to_pylist(maps_as_pydicts="strict")
        names = sorted({name for parts in maps if parts for name in parts})
        return {
            name: read_only(np.array([(parts or {}).get(name, np.nan) for parts in maps], np.float64)) for name in names
        }

    @cached_property
    def step(self) -> Array:
        """[n] int64"""
        return read_only(np.asarray(self._recorded("step").to_numpy(), np.int64))

    @cached_property
    def sample(self) -> Array:
        """[n] int64"""
        return read_only(np.asarray(self.column("sample").to_numpy(), np.int64))

    @cached_property
    def steps(self) -> Array:
        """[S] the steps, ascending."""
        return read_only(np.unique(self.step))

    @cached_property
    def place(self) -> Array:
        """[n] the index of each rollout's step in ``steps``."""
        return read_only(np.searchsorted(self.steps, self.step))

    @cached_property
    def keys(self) -> Array:
        """[n] a number for each rollout, as in ``rollout_keys``."""
        return read_only((self.step << 32) + self.sample)

    @cached_property
    def prompt(self) -> Array:
        """[n] number of each rollout's prompt, the same in all steps; a separate number if the prompt is not known."""
        key = self["group"]
        own = np.nanmax(key, initial=0.0) + 1 + np.arange(len(self))
        return read_only(np.unique(np.where(np.isfinite(key), key, own), return_inverse=True)[1])

    @cached_property
    def group(self) -> Array:
        """[n] group index of each rollout, ascending with the step: rollouts of one step and prompt share it, unless
        the step clearly draws that prompt several times.

        A rollout whose prompt is not known is alone.
        """
        prompt = self.place * (self.prompt.max(initial=0) + 1) + self.prompt
        prompt = np.unique(prompt, return_inverse=True)[1]
        known, draw = np.isfinite(self["group"]), np.zeros(len(self), np.int64)
        draw[known] = draws(prompt[known], self.sample[known])
        return read_only(np.asarray(np.unique(prompt * (draw.max(initial=0) + 1) + draw, return_inverse=True)[1]))

    @cached_property
    def trained_reward(self) -> Array:
        """[n] the reward that training uses: after shaping, where that was recorded."""
        shaped = self["shaped_reward"]
        return read_only(np.where(np.isfinite(shaped), shaped, self["reward"]))

    def of(self, table: pa.Table) -> "Rows":
        """Return some of the rollouts with other columns, such as texts."""
        return Rows(table, derived=self._derived)

    def where(self, kept: Array) -> "Rows":
        """Return the rollouts for which ``kept`` [n] is true."""
        return Rows(self.table.filter(pa.array(kept)), derived=self._derived, cut=self._cut)

    @property
    def table(self) -> pa.Table:
        """The rollouts as they were recorded."""
        return self._table if self._kept is None else self._table.filter(self._kept)

    def since(self, step: int) -> "Rows":
        """Return the rollouts from a step on; nothing is copied."""
        first = int(np.searchsorted(self._table["step"].to_numpy(), step))
        kept = None if self._kept is None else self._kept.slice(first)
        found = Rows(self._table.slice(first), kept, self._derived, self._cut)
        found._whole = self
        return found

    def evidence(self, rollouts: Iterable[int]) -> tuple[Evidence, ...]:
        """Return the first of some rollouts, given by their indices, as evidence."""
        return tuple(Evidence(int(self.step[i]), int(self.sample[i])) for i in islice(rollouts, SHOWN))

    def highest(self, values: Array) -> tuple[Evidence, ...]:
        """Return the rollouts with the largest of the values [n] as evidence; those with NaN or -inf are left out."""
        known = np.flatnonzero(values > -np.inf)
        if len(known) > SHOWN:  # all in order would take twenty times as long
            known = known[np.argpartition(-values[known], SHOWN)[:SHOWN]]
        return self.evidence(known[np.argsort(-values[known], kind="stable")])

    def typical(self, rollouts: Array) -> int:
        """Return the one of some rollouts, [k] indices, with the median reward; of an even number, the lower one."""
        reward = self["reward"][rollouts]
        known = np.isfinite(reward)
        rollouts, reward = (rollouts[known], reward[known]) if known.any() else (rollouts, reward)
        return int(rollouts[np.argsort(reward, kind="stable")[(len(rollouts) - 1) // 2]])

    def by_step(self, values: Array, statistic: Callable[..., Any] = np.mean) -> Series:
        """Return a statistic of the finite values of each step; steps without finite values are left out.

        Args:
            values: [n] one number per rollout.
            statistic: Computes the statistic along the axis of an array that the argument ``axis`` names.
        """
        finite = np.isfinite(values)
        values, step = values[finite], self.step[finite]
        begin = np.flatnonzero(are_first(step))
        count = np.diff(begin, append=len(step))
        found = np.zeros(len(begin))
        for size in np.unique(count):  # at once: a call per step takes longer than the numbers do
            alike = count == size
            found[alike] = statistic(values[begin[alike, None] + np.arange(size)], axis=1)
        return series(step[begin], found)

    def mean(self, name: str) -> Series:
        """Return the mean of a column by step."""
        if name not in self._means:
            values = self[name]
            finite = np.isfinite(values)
            where, size = self.place[finite], len(self.steps)
            with np.errstate(invalid="ignore"):
                mean = np.bincount(where, values[finite], size) / np.bincount(where, minlength=size)
            self._means[name] = Series(*map(read_only, series(self.steps, mean)))
        return self._means[name]


def _is_numeric(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def measured(column: pa.ChunkedArray) -> bool:
    """Return whether a column has any value that is not null, NaN or infinite."""
    if column.null_count == len(column):
        return False
    return not pa.types.is_floating(column.type) or bool(np.isfinite(numbers(column)).any())


def numbers(column: pa.ChunkedArray) -> Array:
    """Return a numeric or boolean column as float64, with NaN for null."""
    return np.asarray(pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy())


def draws(prompt: Array, sample: Array) -> Array:
    """Return [n] which draw of a prompt each response belongs to, 0 where a step draws the prompt once.

    A prompt that is drawn k times has k times as many responses as usual, and each usual number of them, in the order
    of the samples, has consecutive samples. Where trainers order responses in another way, all draws of a prompt are
    one.

    Args:
        prompt: [n] number of each response's prompt in its step.
        sample: [n]
    """
    order = np.lexsort((sample, prompt))
    begins = np.flatnonzero(np.diff(prompt[order], prepend=-1))
    counts = np.diff(begins, append=len(order))
    size = int(np.bincount(counts).argmax()) if len(counts) else 1
    found = np.zeros(len(order), np.int64)
    if size > 1:
        draw = (np.arange(len(order)) - np.repeat(begins, counts)) // size
        is_even = np.repeat(counts % size == 0, counts)
        apart = np.diff(sample[order], prepend=0) != 1
        inside = np.diff(draw, prepend=-1) == 0
        inside[begins] = False
        torn = np.bincount(np.repeat(np.arange(len(counts)), counts), apart & inside)
        found[order] = np.where(is_even & np.repeat(torn == 0, counts), draw, 0)
    return found
