"""A rollout's key, step and sample, as one number, and what tokens belong to by it."""

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array


def rollout_keys(table: pa.Table) -> Array:
    """Returns [N] int64 of ``step`` and ``sample``, in whose order rollouts are."""
    return np.asarray((table["step"].to_numpy().astype(np.int64) << 32) + table["sample"].to_numpy())


def starts_of_runs(values: Array) -> Array:
    """Returns where values begin that are not as the one before."""
    return np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1)[: len(values)]


def rows_of_tokens(rows: pa.Table, tokens: pa.Table) -> tuple[Array, Array]:
    """Returns which line of ``rows`` each token belongs to, and whether it belongs to any."""
    own, wanted = rollout_keys(rows), rollout_keys(tokens)
    if not len(own):
        return np.zeros(len(wanted), np.int64), np.full(len(wanted), False)
    order = np.argsort(own)
    starts = starts_of_runs(wanted)  # the tokens of a rollout mostly stand together: it is looked for once
    at = order[np.minimum(np.searchsorted(own[order], wanted[starts]), len(own) - 1)]
    length = np.diff(starts, append=len(wanted))
    return np.repeat(at, length), np.repeat(own[at] == wanted[starts], length)
