"""The definition of a derivation: a function of the data of a run, and what it needs and gives."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.findings.words import Phrase

DerivedValues = Mapping[str, Any] | None
"""Values by what they are (``rows.NAME``, ``tokens.NAME``, ``steps.METRIC`` or ``info.PATH``); None if the data leave
any doubt. A value is an entry of run.json, a metric (``Series``), or a function from the rollouts (``Rows``) or tokens
(``Sample``) to the column."""
Function = Callable[[Any], DerivedValues]  # of RecordedData, which has derivations


@dataclass(frozen=True)
class Derivation:
    """One way to compute what a record lacks."""

    gives: tuple[str, ...]
    """What it computes: ``rows.NAME``, ``tokens.NAME``, ``steps.METRIC`` or ``info.PATH``."""
    needs: tuple[str, ...]
    """What must be recorded or derived; of alternatives joined by ``|`` one is enough."""
    function: Function
    how: Phrase
    """What the values are computed from, as the report says it."""


def derivation(*, gives: Iterable[str], needs: Iterable[str], how: str) -> Callable[[Function], Derivation]:
    """Create a derivation from a function; for the arguments, see ``Derivation``."""

    def made(function: Function) -> Derivation:
        return Derivation(tuple(gives), tuple(needs), function, Phrase(how))

    return made


def of_sample(sample: Rows, values: Array) -> Callable[[Rows], Array]:
    """Return a column that has the values [n] of the sampled rollouts, and NaN for all others."""

    def column(rows: Rows) -> Array:
        at = np.minimum(np.searchsorted(sample.keys, rows.keys), len(sample) - 1)
        return np.where(sample.keys[at] == rows.keys, values[at], np.nan)

    return column
