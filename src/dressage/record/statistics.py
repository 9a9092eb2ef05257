"""What one rollout's tokens say about it, computed once, by who writes the record."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from dressage.record.precision import Array


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
    wide = {name: np.asarray(values, np.float64) for name, values in tokens.items() if name != "token_id"}
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
    distinct_2, has_pairs = _share_of_different(index, count, ids, 2)
    different, has_fours = _share_of_different(index, count, ids, 4)
    return {
        "distinct_2": pa.array(distinct_2, mask=~has_pairs),
        "repetition": pa.array(1 - different, mask=~has_fours),
    }


def _share_of_different(index: Array, count: int, ids: Array, n: int) -> tuple[Array, Array]:
    """Returns [count] different n-grams divided by all, and [count] whether there are any.

    N-grams of one rollout are told apart by at least 44 bits of a hash, below 2^20 rollouts: with 10,000 tokens, one
    rollout in 300,000 is off by one n-gram. Sorting one number per token is many times faster than np.unique.
    """
    size = max(len(ids) - n + 1, 0)
    grams = ids[:size].astype(np.uint64)
    for i in range(1, n):
        grams = _mixed(grams) + ids[i : size + i].astype(np.uint64)
    whole = index[:size] == index[n - 1 :]
    owner = index[:size][whole]
    bits = np.uint64(max(count - 1, 1).bit_length())
    keys = np.sort((owner.astype(np.uint64) << (np.uint64(64) - bits)) | (_mixed(grams[whole]) >> bits))
    new = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    total = np.bincount(owner, minlength=count)
    different = np.bincount((keys[new] >> (np.uint64(64) - bits)).astype(np.int64), minlength=count)
    return different / np.maximum(total, 1), total > 0


def _mixed(values: Array) -> Array:
    """One step of a multiplicative hash of 64 bits: two shifts and products, after splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = values ^ (values >> np.uint64(31))
    return mixed
