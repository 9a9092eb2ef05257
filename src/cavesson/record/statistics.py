"""Statistics of each rollout's tokens, computed once, when the record is written."""

import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array

_NUMBERS = ("logprob", "ref_logprob", "sampler_logprob", "value", "return", "entropy")


def rollout_statistics(index: Array, count: int, tokens: Mapping[str, Array]) -> dict[str, pa.Array]:
    """Return the columns ``STATISTICS`` of ``count`` rollouts for which the token columns exist.

    Args:
        index: [N] which rollout, 0 to ``count`` − 1, each response token belongs to; no padding. The tokens of a
            rollout are contiguous, ordered by position.
        count: Number of rollouts.
        tokens: [N] columns, of which ``token_id``, ``logprob``, ``ref_logprob``, ``sampler_logprob``, ``value``,
            ``return`` and ``entropy`` are read.

    Returns:
        [count] arrays; a mean over no tokens is null. k1 and k3 follow Schulman, "Approximating KL Divergence",
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
    """Return ``distinct_2`` and ``repetition``; n-grams never span two rollouts."""
    index = np.asarray(index, np.int64)
    ids = ids.astype(np.int64) - min(int(ids.min(initial=0)), 0)
    whole = _within(index, 2)
    owner = index[:-1][whole]
    order, new = _sorted(_combined(owner, ids[:-1][whole], ids[1:][whole]))
    distinct_2, has_pairs = _share(owner, new, count)
    pairs = np.zeros(len(whole), np.int64)
    pairs[np.flatnonzero(whole)[order]] = np.cumsum(new)
    # Four tokens are two pairs; the second pair starts two tokens after the first.
    whole = _within(index, 4)
    owner = index[:-3][whole]
    ordered = np.sort(_combined(owner, pairs[:-2][whole], pairs[2:][whole]))
    different, has_fours = _share(owner, _first_ones(ordered), count)
    return {
        "distinct_2": pa.array(distinct_2, mask=~has_pairs),
        "repetition": pa.array(1 - different, mask=~has_fours),
    }


def _within(index: Array, n: int) -> Array:
    """Return, for each index that starts ``n`` tokens, whether all of them belong to the same rollout."""
    return np.asarray(index[: max(len(index) - n + 1, 0)] == index[n - 1 :])


def _combined(owner: Array, first: Array, second: Array) -> Array:
    """Combine a rollout index and two non-negative numbers into one number that ascends with the rollout."""
    sizes = [int(column.max(initial=0)) + 1 for column in (owner, first, second)]
    if math.prod(sizes) < 2**63:
        return np.asarray((owner * sizes[1] + first) * sizes[2] + second)
    columns = np.stack([owner, first, second], axis=1)
    return np.unique(columns, axis=0, return_inverse=True)[1].reshape(-1)


def _sorted(numbers: Array) -> tuple[Array, Array]:
    """Return the order that sorts non-negative numbers, and which sorted numbers are the first of equal ones."""
    bits = len(numbers).bit_length()
    if int(numbers.max(initial=0)) >= 2 ** (63 - bits):
        order = np.argsort(numbers)
        return order, _first_ones(numbers[order])
    # If the index fits into the same integer as the number, sorting both at once takes a third of the time.
    both = np.sort(numbers << bits | np.arange(len(numbers)))
    return both & (1 << bits) - 1, _first_ones(both >> bits)


def _first_ones(ordered: Array) -> Array:
    return np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]


def _share(owner: Array, new: Array, count: int) -> tuple[Array, Array]:
    """Return [count] the share of distinct combinations of each rollout, and [count] whether it has any.

    Args:
        owner: [N] which rollout each combination belongs to.
        new: [N] which of the sorted combinations are the first of equal ones.
        count: Number of rollouts.
    """
    total = np.bincount(owner, minlength=count)
    different = np.bincount(np.repeat(np.arange(count), total)[new], minlength=count)
    return different / np.maximum(total, 1), total > 0
