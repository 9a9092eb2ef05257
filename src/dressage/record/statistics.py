"""What one rollout's tokens say about it, computed once, by who writes the record."""

import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from dressage.record.precision import Array

_NUMBERS = ("logprob", "ref_logprob", "sampler_logprob", "value", "return", "entropy")


def rollout_statistics(index: Array, count: int, tokens: Mapping[str, Array]) -> dict[str, pa.Array]:
    """Returns the columns ``STATISTICS`` of ``count`` rollouts, those whose token columns are there.

    Args:
        index: [N] which rollout, 0 to ``count`` − 1, each response token belongs to; no padding. The tokens of a
            rollout stand together, in the order of their positions.
        count: Number of rollouts.
        tokens: [N] columns, of which ``token_id``, ``logprob``, ``ref_logprob``, ``sampler_logprob``, ``value``,
            ``return`` and ``entropy`` are read.

    Returns:
        [count] arrays; a mean over nothing is null. k1 and k3 after Schulman, "Approximating KL Divergence",
        http://joschu.net/blog/kl-approx.html, with samples from the policy.
    """
    wide = {name: np.asarray(tokens[name], np.float64) for name in _NUMBERS if name in tokens}
    length = np.bincount(index, minlength=count)
    found: dict[str, Array] = {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if {"logprob", "ref_logprob"} <= wide.keys():
            delta = wide["logprob"] - wide["ref_logprob"]
            found["k1"] = np.bincount(index, delta, minlength=count)
            found["k3"] = np.bincount(index, np.expm1(-delta) + delta, minlength=count) / length
            found["log_ratio_max"] = _largest(index, count, np.abs(delta))
        if "entropy" in wide:
            found["entropy"] = np.bincount(index, wide["entropy"], minlength=count) / length
        if {"logprob", "sampler_logprob"} <= wide.keys():
            gap = np.abs(wide["logprob"] - wide["sampler_logprob"])
            found["sampler_gap"] = np.bincount(index, gap, minlength=count) / length
        if {"value", "return"} <= wide.keys():
            squares = (wide["value"] - wide["return"]) ** 2
            found["value_error"] = np.sqrt(np.bincount(index, squares, minlength=count) / length)
    columns = {name: pa.array(found[name], mask=(length == 0) & (name != "k1")) for name in found}
    if "token_id" in tokens:
        columns |= _ngram_statistics(index, count, np.asarray(tokens["token_id"]))
    return {"length": pa.array(length, pa.int32()), **columns}


def _largest(index: Array, count: int, values: Array) -> Array:
    largest = np.zeros(count)
    np.maximum.at(largest, index, values)
    return largest


def _ngram_statistics(index: Array, count: int, ids: Array) -> dict[str, pa.Array]:
    """Returns ``distinct_2`` and ``repetition``; n-grams never reach over the end of a rollout."""
    whole = _within(index, 2)
    pairs, distinct = np.zeros(len(whole), np.int64), _Ranked(index[:-1][whole], ids[:-1][whole], ids[1:][whole])
    pairs[whole] = distinct.rank()
    # Four tokens are two pairs, the second one two tokens after the first.
    whole = _within(index, 4)
    fours = _Ranked(index[:-3][whole], pairs[:-2][whole], pairs[2:][whole])
    distinct_2, has_pairs = distinct.share(count)
    different, has_fours = fours.share(count)
    return {
        "distinct_2": pa.array(distinct_2, mask=~has_pairs),
        "repetition": pa.array(1 - different, mask=~has_fours),
    }


def _within(index: Array, n: int) -> Array:
    """Returns whether the ``n`` tokens from each one on belong to one rollout, for those that have so many after."""
    return np.asarray(index[: max(len(index) - n + 1, 0)] == index[n - 1 :])


class _Ranked:
    """Combinations of a rollout and two whole numbers, sorted: equal ones stand together.

    Where the three fit into 63 bits, as they nearly always do, one number is sorted instead of three.
    """

    def __init__(self, owner: Array, first: Array, second: Array) -> None:
        self._owner = owner
        columns = [owner.astype(np.int64), first.astype(np.int64), second.astype(np.int64)]
        columns = [column - column.min(initial=2**31) for column in columns]
        sizes = [int(column.max(initial=0)) + 1 for column in columns]
        if math.prod(sizes) < 2**63:
            columns = [(columns[0] * sizes[1] + columns[1]) * sizes[2] + columns[2]]
        self._order = np.lexsort(columns[::-1]) if len(columns) > 1 else np.argsort(columns[0])
        self._new = np.full(len(owner), False)
        self._new[:1] = True
        for column in columns:
            ordered = column[self._order]
            self._new[1:] |= ordered[1:] != ordered[:-1]

    def rank(self) -> Array:
        """Returns the place of each combination among the different ones."""
        rank = np.empty(len(self._order), np.int64)
        rank[self._order] = np.cumsum(self._new) - 1
        return rank

    def share(self, count: int) -> tuple[Array, Array]:
        """Returns [count] different combinations divided by all of a rollout, and [count] whether it has any."""
        total = np.bincount(self._owner, minlength=count)
        different = np.bincount(self._owner[self._order[self._new]], minlength=count)
        return different / np.maximum(total, 1), total > 0
