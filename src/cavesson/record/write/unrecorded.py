"""What a recorder was never given, and how many more rules of the doctor could be applied with it."""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib.resources import files
from typing import NamedTuple

EVERY_LOOP = ("token_id", "logprob", "ref_logprob", "sampler_logprob", "entropy", "advantage")
"""The columns of tokens that a loop has whatever its algorithm is; others, such as those of a critic, it may lack."""
WITH_TOKENS = frozenset(["tokens.position", "tokens.learned"])
"""Recorded as soon as there are tokens."""


class Addition(NamedTuple):
    """Columns of tokens to record, and the number of rules that could be applied in addition."""

    columns: tuple[str, ...]
    rules: int

    def __str__(self) -> str:
        rules = "1 more rule" if self.rules == 1 else f"{self.rules} more rules"
        columns = f"token column{'s' if len(self.columns) > 1 else ''} {' and '.join(self.columns)}"
        given = ", ".join(f'"{name}": …' for name in self.columns)
        return f"with the {columns}, the doctor could apply {rules}: recorder.rollouts(step, rows, {{…, {given}}})"


def best_addition(given: Collection[str]) -> Addition | None:
    """Return the columns of tokens with the most additional rules for each of them; None if no column adds one.

    Args:
        given: What was recorded: ``rows.NAME``, ``tokens.NAME`` and ``steps.METRIC``.
    """
    rules, known = _sufficient(), _with_implied(given)
    open_rules = [sets for sets in rules.values() if not any(known.issuperset(one) for one in sets)]
    possible = {f"tokens.{name}" for name in EVERY_LOOP}
    missing = {frozenset(one) - known - WITH_TOKENS for sets in open_rules for one in sets}
    additions = [_addition(columns, known, open_rules) for columns in missing if columns <= possible]
    return min(additions, key=lambda one: (-one.rules / len(one.columns), one.columns), default=None)


def _addition(columns: frozenset[str], known: frozenset[str], rules: Sequence[Sequence[Sequence[str]]]) -> Addition:
    more = _with_implied(known | columns)
    names = tuple(name for name in EVERY_LOOP if f"tokens.{name}" in columns)
    return Addition(names, sum(any(more.issuperset(one) for one in sets) for sets in rules))


def _with_implied(given: Collection[str]) -> frozenset[str]:
    known = frozenset(given) | {"steps.step"}
    return known | WITH_TOKENS if any(name.startswith("tokens.") for name in known) else known


def _sufficient() -> Mapping[str, Sequence[Sequence[str]]]:
    """Return the sets of columns that suffice for each rule; a test compares them with the rules."""
    text = files("cavesson.record.write").joinpath("sufficient.toml").read_text("utf-8")
    rules: Mapping[str, Sequence[Sequence[str]]] = tomllib.loads(text)
    return rules
