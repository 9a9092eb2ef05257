"""Statistics of each rollout's tokens and turns, computed once, when the record is written."""

from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from cavesson.record.derived import DERIVED
from cavesson.record.keys import rollout_keys
from cavesson.record.precision import Array
from cavesson.record.schema import SOURCE_CODES
from cavesson.text.ngrams import NGrams


def _sum(index: Array, count: int, values: Array) -> Array:
    return np.bincount(index, values, minlength=count)


def _mean(index: Array, count: int, values: Array) -> Array:
    return _sum(index, count, values) / np.bincount(index, minlength=count)


def _largest(index: Array, count: int, values: Array) -> Array:
    largest = np.zeros(count)
    np.maximum.at(largest, index, np.abs(values))
    return largest


_K1, _K3, _TEACHER, _GAP = (DERIVED[name] for name in ("kl_k1", "kl_k3", "teacher_kl", "sampler_gap"))
_FORMULAS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Array]], Array], Callable[..., Array]]] = {
    "kl_k1": (_K1.needs, _K1.of, _sum),
    "kl_k3": (_K3.needs, _K3.of, _mean),
    "teacher_kl": (_TEACHER.needs, _TEACHER.of, _sum),
    "log_ratio_max": (_K1.needs, _K1.of, _largest),
    "entropy": (("entropy",), lambda tokens: tokens["entropy"], _mean),
    "sampler_gap": (_GAP.needs, lambda tokens: np.abs(_GAP.of(tokens)), _mean),
    "value_error": (
        ("value", "return"),
        lambda tokens: tokens["value"] - tokens["return"],
        lambda index, count, values: np.sqrt(_mean(index, count, values**2)),
    ),
}
"""Statistic of a rollout → the token columns it needs, what it takes of each token, and what it makes of them."""
NEEDS = {name: needs for name, (needs, *_) in _FORMULAS.items()} | dict.fromkeys(
    ("distinct_2", "repetition"), ("token_id",)
)
"""Statistic of a rollout → the token columns it is computed from."""
STATISTICS = ("length", *NEEDS)
"""The row columns that the recorder computes from the token columns."""
TURN_STATISTICS = ("turns", "calls", "call_errors")
"""The row columns that the recorder computes from the turns."""


def turn_statistics(rows: pa.Table, turns: pa.Table) -> dict[str, pa.Array]:
    """Return the columns ``TURN_STATISTICS`` of [N] rollouts; null for those without turns.

    All turns belong to these rollouts.
    """
    keys = rollout_keys(rows)
    order = np.argsort(keys)
    owner = order[np.searchsorted(keys[order], rollout_keys(turns))]
    role = np.array(turns["role"].to_pylist(), object)
    failed = turns["error"].is_valid().to_numpy()
    which = {"turns": role == "assistant", "calls": role == "tool", "call_errors": (role == "tool") & failed}
    unknown = np.bincount(owner, minlength=len(keys)) == 0
    return {
        name: pa.array(np.bincount(owner[those], minlength=len(keys)), pa.int32(), mask=unknown)
        for name, those in which.items()
    }


def rollout_statistics(index: Array, count: int, tokens: Mapping[str, Array]) -> dict[str, pa.Array]:
    """Return the columns ``STATISTICS`` of ``count`` rollouts for which the token columns exist.

    ``index`` [N] is the rollout, 0 to ``count`` − 1, of each response token; no padding. The tokens of a rollout are
    contiguous, ordered by position. Of their columns, those in ``NEEDS`` are read.

    Returns:
        [count] arrays; a mean over no tokens is null, and so is what needs a sampler in a response of the data.
    """
    needed = {name for needs, *_ in _FORMULAS.values() for name in needs}
    of_data = np.asarray(tokens["source"] == SOURCE_CODES["data"]) if "source" in tokens else np.zeros(len(index), bool)
    not_sampled = np.bincount(index[of_data], minlength=count) > 0
    wide = {name: np.asarray(tokens[name], np.float64) for name in needed if name in tokens}
    length = np.bincount(index, minlength=count)
    columns = {}
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for name, (needs, values, reduce) in _FORMULAS.items():
            if wide.keys() >= set(needs):
                found = reduce(index, count, values(wide))
                unknown = (length == 0) & (reduce is not _sum)
                columns[name] = pa.array(found, mask=unknown | (not_sampled & ("sampler_logprob" in needs)))
    if "token_id" in tokens:
        columns |= _ngram_statistics(index, count, np.asarray(tokens["token_id"]))
    return {"length": pa.array(length, pa.int32()), **columns}


def _ngram_statistics(index: Array, count: int, ids: Array) -> dict[str, pa.Array]:
    """Return ``distinct_2`` and ``repetition``."""
    ids, index = ids.astype(np.int64) - min(int(ids.min(initial=0)), 0), np.asarray(index, np.int64)
    pairs = NGrams(ids, index, index).doubled()
    distinct_2, distinct_4 = pairs.distinct(count), pairs.doubled().distinct(count)
    return {
        "distinct_2": pa.array(distinct_2, mask=np.isnan(distinct_2)),
        "repetition": pa.array(1 - distinct_4, mask=np.isnan(distinct_4)),
    }
