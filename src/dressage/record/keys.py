"""A rollout's key, step and sample, as one number, and what tokens belong to by it."""

import numpy as np
import pyarrow as pa

from dressage.record.precision import Array


def rollout_keys(table: pa.Table) -> Array:
    """Returns [N] int64 of ``step`` and ``sample``, in whose order rollouts are."""
    return np.asarray((table["step"].to_numpy().astype(np.int64) << 32) + table["sample"].to_numpy())


def rows_of_tokens(rows: pa.Table, tokens: pa.Table) -> tuple[Array, Array]:
    """Returns which line of ``rows`` each token belongs to, and whether it belongs to any."""
    own, wanted = rollout_keys(rows), rollout_keys(tokens)
    if not len(own):
        return np.zeros(len(wanted), np.int64), np.full(len(wanted), False)
    order = np.argsort(own)
    at = order[np.minimum(np.searchsorted(own[order], wanted), len(own) - 1)]
    return at, own[at] == wanted
