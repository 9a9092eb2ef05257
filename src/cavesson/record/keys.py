"""Combine the step and sample of a rollout into one key, and match tokens to their rows by it."""

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array


def rollout_keys(table: pa.Table) -> Array:
    """Return [N] int64 keys of ``step`` and ``sample``, which sort like (step, sample)."""
    return np.asarray((table["step"].to_numpy().astype(np.int64) << 32) + table["sample"].to_numpy())


def are_first(values: Array) -> Array:
    """Return [N] whether each value is the first of a run of equal values."""
    return np.append(True, values[1:] != values[:-1])[: len(values)]


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
