"""Earlier names of token columns, which older records have."""

from collections.abc import Collection, Sequence

import pyarrow as pa

FORMER = {"mask": "learned"}
"""Earlier name → present name."""


def names_in(names: Sequence[str], columns: Collection[str]) -> list[str]:
    """Return those of the names of a file that are, or were earlier called, one of ``columns``."""
    return [name for name in names if FORMER.get(name, name) in columns]


def current(tokens: pa.Table) -> pa.Table:
    """Return tokens with the present names of their columns."""
    if FORMER.keys().isdisjoint(tokens.column_names):
        return tokens
    return tokens.rename_columns([FORMER.get(name, name) for name in tokens.column_names])
