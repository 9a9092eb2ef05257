"""The smallest sets of recorded columns from which all that a rule needs can be had."""

from collections.abc import Collection, Iterable
from itertools import product

from cavesson.doctor.derivation import Derivation
from cavesson.doctor.derive import BY_NAME
from cavesson.doctor.rule import Rule
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS
from cavesson.record.write.statistics import NEEDS

Columns = frozenset[str]
ANY_TOKENS = "tokens.position"
"""Stands for a table of tokens, whatever its columns: it has the length of every response."""
COMPUTED = {f"rows.{name}": frozenset(f"tokens.{one}" for one in needs) for name, needs in NEEDS.items()}
COMPUTED["rows.length"] = frozenset([ANY_TOKENS])
"""Statistics of a rollout → the columns of tokens from which every recorder and importer computes them."""
RECORDED = {f"rows.{column.name}" for column in ROW_COLUMNS} | {f"tokens.{column.name}" for column in TOKEN_COLUMNS}


def smallest_sets(rule: Rule) -> list[Columns]:
    """Return the smallest sets of recorded columns that suffice for a rule, with or without derivations.

    Whether the values of these columns determine what is derived from them is up to the run.

    Returns:
        Sets of which none contains another, those with fewer columns first.
    """
    recorded = [need for need in rule.needs if need in rule.recorded]
    others = [need for need in rule.needs if need not in rule.recorded]
    plain = product(*([way for one in need.split("|") for way in _recorded(one)] for need in recorded))
    return _smallest({ways.union(*chosen) for chosen in plain for ways in _all_of(others, ())})


def _all_of(needs: Iterable[str], deriving: tuple[Derivation, ...]) -> list[Columns]:
    chosen = product(*([way for one in need.split("|") for way in _one(one, deriving)] for need in needs))
    return _smallest({frozenset[str]().union(*ways) for ways in chosen})


def _one(name: str, deriving: tuple[Derivation, ...]) -> list[Columns]:
    """Return the sets that suffice for one column or setting, without what is already being derived."""
    ways = _recorded(name)
    derivation = BY_NAME.get(name)
    if derivation is not None and derivation not in deriving:
        ways += _all_of(derivation.needs, (*deriving, derivation))
    return ways


def _recorded(name: str) -> list[Columns]:
    """Return the set that records one column or setting; none for a column that can only be derived."""
    is_column = name.startswith(("rows.", "tokens."))
    return [COMPUTED.get(name, frozenset([name]))] if name in RECORDED or not is_column else []


def _smallest(sets: Collection[Columns]) -> list[Columns]:
    plain = {_without_any(one) for one in sets}
    found = [one for one in plain if not any(other < one or _implies(one, other) for other in plain)]
    return sorted(found, key=lambda one: (len(one), sorted(one)))


def _without_any(columns: Columns) -> Columns:
    """Return the columns without ``ANY_TOKENS`` if another column of the tokens is among them."""
    return columns - {ANY_TOKENS} if _has_tokens(columns - {ANY_TOKENS}) else columns


def _implies(columns: Columns, other: Columns) -> bool:
    """Return whether ``columns`` include ``other``, in which any column of tokens is enough, and more."""
    return ANY_TOKENS in other and _has_tokens(columns - {ANY_TOKENS}) and other - {ANY_TOKENS} <= columns


def _has_tokens(columns: Columns) -> bool:
    return any(name.startswith("tokens.") for name in columns)
