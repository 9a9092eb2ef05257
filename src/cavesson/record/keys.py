"""Combine the step and sample of a rollout into one key, match tokens to their rows by it, and sort by keys."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array
from cavesson.sorted_arrays import are_first

ARRAY_BYTES = 2**31
"""An Arrow array of texts has fewer."""


def rollout_keys(table: pa.Table) -> Array:
    """Return [N] int64 keys of ``step`` and ``sample``, which sort like (step, sample)."""
    return np.asarray((table["step"].to_numpy().astype(np.int64) << 32) + table["sample"].to_numpy())


def starts_of_runs(values: Array) -> Array:
    """Return the start index of each run of equal values."""
    return np.flatnonzero(are_first(values))


def rows_of_tokens(rows: pa.Table, tokens: pa.Table) -> tuple[Array, Array]:
    """Return the index of each token's row in ``rows``, and whether it has one."""
    own, wanted = rollout_keys(rows), rollout_keys(tokens)
    if not len(own):
        return np.zeros(len(wanted), np.int64), np.full(len(wanted), False)
    order = np.argsort(own)
    starts = starts_of_runs(wanted)  # tokens of a rollout are mostly contiguous: search only once per run
    at = order[np.minimum(np.searchsorted(own[order], wanted[starts]), len(own) - 1)]
    length = np.diff(starts, append=len(wanted))
    return np.repeat(at, length), np.repeat(own[at] == wanted[starts], length)


def sorted_rows(table: pa.Table, order: Sequence[str]) -> pa.Table:
    """Return the rows sorted by some columns; they usually are sorted already, or nearly so."""
    indices = np.lexsort([table[name].to_numpy() for name in reversed(order)])
    if np.array_equal(indices, np.arange(table.num_rows)):
        return table
    return table.take(indices) if table.nbytes < ARRAY_BYTES else taken_in_runs(table, indices)


def taken_in_runs(table: pa.Table, indices: Array) -> pa.Table:
    """Return rows of a table without copying them; ``take`` fails for texts that one array cannot hold."""
    begins = np.flatnonzero(np.diff(indices, prepend=-2) != 1)
    sizes = np.diff(begins, append=len(indices))
    return pa.concat_tables(table.slice(first, size) for first, size in zip(indices[begins], sizes, strict=True))
