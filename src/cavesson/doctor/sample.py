"""A sample of the rollouts of a run with texts and tokens, large enough for the rules but limited for long runs."""

from dataclasses import replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.doctor.rows import Lookup, Rows, measured, nothing, numbers
from cavesson.doctor.series import Array, Series, read_only
from cavesson.findings.finding import Evidence
from cavesson.findings.words import Phrase
from cavesson.record import Run
from cavesson.record.derived import DERIVED
from cavesson.record.keys import rows_of_tokens
from cavesson.record.schema import SOURCE_CODES, SOURCES

MAX_TOKENS = 500_000
MAX_STEPS = 96
TEXT = 64.0
"""Tokens that take about as long to read as the texts of a rollout without tokens, whose length is not known."""
EDGE, LATEST = 4, 32
"""Numbers of steps at the beginning and at the end that are always included; windows are judged at the end."""
GOLDEN = (5**0.5 - 1) / 2
"""The fractional parts of its multiples are evenly spread."""
WORST = 50
"""Number of tokens from which the evidence is chosen."""
TENTHS = Phrase("tenths of the tokens, the least probable first")
MIN_ROWS = 8
"""Minimum number of rollouts per step, if it has so many, whatever their length."""


class Sample:
    """Rollouts and their concatenated tokens."""

    _whole: "Sample | None" = None
    """The sample of which this is the last part."""

    def __init__(self, rows: Rows, tokens: pa.Table, derived: Lookup = nothing, ahead: bool = False) -> None:
        """Wrap rollouts and their tokens, both ordered by step and sample, the tokens also by position.

        Args:
            rows: the rollouts.
            tokens: their tokens.
            derived: what computes columns of the tokens that were not recorded, as in ``Rows``.
            ahead: whether weights older than those of the step may have sampled them. Where they have, there is no
                `sampler_gap`: sampler and trainer must differ.
        """
        self.rows = rows
        self.line = read_only(rows_of_tokens(rows.table, tokens)[0])
        """[N] which rollout each token is of, ascending."""
        self._tokens, self._derived, self._ahead = tokens, derived, ahead
        self._columns: dict[str, Array] = {}
        self._is_recorded: dict[str, bool] = {}

    def since(self, step: int) -> "Sample":
        """Return the rollouts and tokens from a step on."""
        tokens = self._tokens.slice(int(np.searchsorted(self.step, step)))
        found = Sample(self.rows.since(step), tokens, self._derived, self._ahead)
        found._whole = self
        return found

    def __len__(self) -> int:
        return len(self.line)

    def __getitem__(self, name: str) -> Array:
        """Return a recorded or derived token column, [N] float64, NaN where not measured."""
        if name not in self._columns:
            whole = self._whole
            self._columns[name] = (
                read_only(self._made(name)) if whole is None else whole[name][len(whole) - len(self) :]
            )
        return self._columns[name]

    def _made(self, name: str) -> Array:
        if name == "sampler_gap" and self._ahead:
            is_old = (self.rows["policy_version"] < self.rows.step)[self.line]
            return np.where(is_old, np.nan, self["logprob"] - self["sampler_logprob"])
        if name in DERIVED:
            return DERIVED[name].of({need: self[need] for need in DERIVED[name].needs})
        compute = None if self.recorded(name) else self._derived(name)
        if compute is not None:
            return np.asarray(compute(self))
        if name not in self._tokens.column_names:
            return np.full(len(self), np.nan)
        return numbers(self._tokens[name])

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a token column as it was recorded."""
        return self._tokens[name]

    def has(self, name: str) -> bool:
        """Return whether a token column was recorded for any token, or can be derived."""
        return bool(np.isfinite(self[name]).any())

    def recorded(self, name: str) -> bool:
        """Return whether a token column was recorded for any token."""
        if name in DERIVED:
            return all(self.recorded(need) for need in DERIVED[name].needs)
        if name not in self._is_recorded:
            self._is_recorded[name] = name in self._tokens.column_names and measured(self._tokens[name])
        return self._is_recorded[name]

    @cached_property
    def trained(self) -> Array:
        """[N] whether a token is trained on; all are if the record does not say."""
        return read_only(np.asarray(self["learned"] != 0))

    @cached_property
    def source(self) -> Array:
        """[N] where each token comes from, as ``SOURCE_CODES``; −1 where the record does not say."""
        if "source" not in self._tokens.column_names:
            return read_only(np.full(len(self), SOURCE_CODES[None]))
        codes = pc.index_in(self._tokens["source"], pa.array(SOURCES))
        return read_only(np.asarray(pc.fill_null(codes, SOURCE_CODES[None]).to_numpy()))

    @cached_property
    def position(self) -> Array:
        """[N] int64, from 0."""
        return read_only(np.asarray(self._tokens["position"].to_numpy(), np.int64))

    @cached_property
    def step(self) -> Array:
        """[N] the step of each token."""
        return read_only(self.rows.step[self.line])

    @cached_property
    def place(self) -> Array:
        """[N] the index of each token's step in those of the rollouts."""
        return read_only(self.rows.place[self.line])

    @cached_property
    def length(self) -> Array:
        """[n] number of trained tokens of each rollout."""
        return read_only(np.bincount(self.line[self.trained], minlength=len(self.rows)))

    @cached_property
    def last(self) -> Array:
        """[N] whether a token is the last trained token of its rollout."""
        found = np.zeros(len(self), bool)
        counted = np.flatnonzero(self.trained)
        if len(counted):
            line = self.line[counted]
            found[counted[np.append(line[1:] != line[:-1], True)]] = True
        return read_only(found)

    @cached_property
    def behind(self) -> Array:
        """[N] whether a token is the first one after the last trained token of its rollout."""
        found = np.zeros(len(self), bool)
        found[1:] = self.last[:-1] & (self.line[1:] == self.line[:-1])
        return read_only(found)

    @property
    def drawn(self) -> Array:
        """[N] the log-probability with which each token was sampled: the sampler's own, or the trainer's without it."""
        return self["sampler_logprob" if self.has("sampler_logprob") else "logprob"]

    def total(self, values: Array) -> Array:
        """Return [n] the sum over the trained tokens of each rollout; NaN if one of them was not measured."""
        return np.bincount(self.line[self.trained], values[self.trained], minlength=len(self.rows))

    def mean_by_step(self, values: Array) -> Series:
        """Return the mean over the finite values [N] of the trained tokens of each step."""
        return self._mean(*self._measured(values, self.trained))

    def variance_by_step(self, values: Array, of: Array | None = None) -> Series:
        """Return the variance over the finite values [N] of each step, of the tokens ``of`` [N] or the trained ones."""
        where, values = self._measured(values, self.trained if of is None else of)
        mean = self._mean(where, values)
        centre = np.zeros(len(self.rows.steps))
        centre[np.searchsorted(self.rows.steps, mean.step)] = mean.value
        return self._mean(where, (values - centre[where]) ** 2)

    def _measured(self, values: Array, of: Array) -> tuple[Array, Array]:
        """Return the indices of the steps of the finite values of some tokens, and the values."""
        there = np.isfinite(values) & of
        return self.place[there], values[there]

    def _mean(self, where: Array, values: Array) -> Series:
        size = len(self.rows.steps)
        count = np.bincount(where, minlength=size)
        known = count > 0
        return Series(self.rows.steps[known], np.bincount(where, values, size)[known] / count[known])

    def worst(self, values: Array) -> tuple[Evidence, ...]:
        """Return the tokens with the largest of the values [N] as evidence, at most one per rollout."""
        known = np.flatnonzero(np.isfinite(values))
        some = known[np.argpartition(-values[known], WORST)[:WORST]] if len(known) > WORST else known
        return self.spans(some[np.argsort(-values[some])])

    def spans(self, tokens: Array) -> tuple[Evidence, ...]:
        """Return the first three of some tokens, given by their indices, as evidence, at most one per rollout."""
        _, first = np.unique(self.line[tokens], return_index=True)
        chosen = tokens[np.sort(first)][:3]
        places = zip(self.rows.evidence(self.line[chosen]), self.position[chosen].tolist(), strict=True)
        return tuple(replace(place, start=at, stop=at + 1) for place, at in places)


def by_tenth(order: Array, values: Array) -> Series:
    """Return the mean of the finite values [N] in each tenth of the tokens, sorted by ``order`` [N]."""
    known = np.flatnonzero(np.isfinite(order) & np.isfinite(values))
    parts = np.array_split(known[np.argsort(order[known])], 10)
    return Series(np.arange(1, 11), np.array([values[part].mean() for part in parts]))


def take_sample(run: Run, rows: Rows, derived: Lookup = nothing, ahead: bool = False) -> Sample:
    """Read whole groups of rollouts from steps across the whole run, within the limit of ``MAX_TOKENS``.

    Args:
        run: The run.
        rows: All training rollouts of the run, without texts.
        derived: What computes columns of tokens that were not recorded, as in ``Sample``.
        ahead: As in ``Sample``.
    """
    steps = chosen_steps(rows.steps)
    typical = max(float(np.nanmean(rows["length"])), 1.0) if rows.has("length") else TEXT
    budget = max(MIN_ROWS, int(MAX_TOKENS / max(len(steps), 1) / typical))
    rollouts = [(step, sample) for step in steps.tolist() for sample in rows.sample[_some(rows, step, budget)].tolist()]
    return Sample(rows.of(run.fetch(rollouts)), run.tokens_of(rollouts), derived, ahead)


def chosen_steps(steps: Array, most: int = MAX_STEPS) -> Array:
    """Return the first and last steps, and evenly spaced steps between them."""
    if len(steps) <= most:
        return steps
    between = np.linspace(EDGE, len(steps) - LATEST - 1, most - EDGE - LATEST).round().astype(int)
    places = np.concatenate([np.arange(EDGE), between, np.arange(len(steps) - LATEST, len(steps))])
    return np.asarray(steps[np.unique(places)])


def _some(rows: Rows, step: int, budget: int) -> Array:
    """Return the indices of rollouts of one step: adjacent whole groups, up to the budget."""
    start, stop = np.searchsorted(rows.step, [step, step + 1])
    if stop - start <= budget:
        return np.arange(start, stop)
    groups, first, size = np.unique(rows.group[start:stop], return_index=True, return_counts=True)
    count = max(1, int(budget / size.mean()))
    # Each process writes its own part of a step; the window moves from step to step, so that all parts are sampled.
    place = int((len(groups) - count + 1) * (step * GOLDEN % 1))
    chosen = groups[np.argsort(first)][place : place + count]
    return np.asarray(start + np.flatnonzero(np.isin(rows.group[start:stop], chosen))[: max(budget, int(size.max()))])
