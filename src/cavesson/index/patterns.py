"""How often each feature occurs in each part of the run, and which rewards the responses with it get."""

from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from cavesson.index.columns import Array
from cavesson.index.folder import BLOCK, Piece, State
from cavesson.index.maps import mapped_table, write_table
from cavesson.index.postings import PART, Postings
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import GIVEN, HELD_OUT, Split

GROUPS = 16
"""Most groups of steps that the rollouts of a split in a piece are counted in."""
SHARE = 0.01
"""A feature is kept that so many of the responses of any group have."""
MIN_RESPONSES = 2
"""But at least so many responses."""
HELD_OUT_BIT = 32
"""Of a number that tells apart the steps of both splits; steps have 31 bits."""


class Counts(NamedTuple):
    """Counts over the responses of one piece of the run, in groups of consecutive steps of one split.

    The mean of the step and split is subtracted from each reward. Otherwise, a feature that is frequent when all
    rewards are high would seem to raise them.
    """

    steps: Array
    """[G, 2] first and last step of each group."""
    held_out: Array
    """[G] whether its responses are held out."""
    responses: Array
    """[G] how many there are."""
    scored: Array
    """[G] how many of them have a reward."""
    squares: Array
    """[G] sum of the squares of their rewards."""
    feature: Array
    """[K] numbers of the features."""
    counts: Array
    """[K, G] responses that have each."""
    scored_counts: Array
    """[K, G] how many of those have a reward."""
    reward: Array
    """[K, G] sum of their rewards."""

    def of(self, split: Split) -> "Counts":
        """Return the groups of a split that have responses, and the features that are frequent in one of them.

        There are none of the split ``given``: these texts are not the policy's.
        """
        there = (self.held_out == (split == HELD_OUT)) & (self.responses > 0) & (split != GIVEN)
        counts, responses = self.counts[:, there], self.responses[there]
        kept = _is_frequent(counts, responses)
        return Counts(
            self.steps[there],
            self.held_out[there],
            responses,
            self.scored[there],
            self.squares[there],
            self.feature[kept],
            counts[kept],
            self.scored_counts[kept][:, there],
            self.reward[kept][:, there],
        )


def counted(snapshot: Snapshot, piece: Piece, postings: Postings) -> Counts:
    """Count the features of a piece, without superseded rollouts and responses of the data."""
    rows = slice(piece.first, piece.stop)
    step, reward = snapshot.raw("step")[rows], snapshot.column("reward")[rows].astype(np.float64)
    alive = np.ones(len(step), np.bool_) if snapshot.alive is None else snapshot.alive[rows]
    if snapshot.given is not None:
        alive = alive & ~snapshot.given[rows]
    scored = alive & np.isfinite(reward)
    reward = np.where(scored, reward, 0)
    held_out = np.zeros(len(step), np.bool_) if snapshot.held_out is None else snapshot.held_out[rows]
    # Held-out rollouts come last, so that every group is of one split.
    names, of_step = np.unique(step + (held_out.astype(np.int64) << HELD_OUT_BIT), return_inverse=True)
    per_step = np.bincount(of_step, scored, minlength=len(names))
    mean = np.bincount(of_step, reward, minlength=len(names)) / np.maximum(per_step, 1)
    centred = np.where(scored, reward - mean[of_step], 0)
    group_of_step, first, last = _groups(names >> HELD_OUT_BIT)
    group, groups = group_of_step[of_step], len(first)
    responses, known = (np.bincount(group, which, minlength=groups) for which in (alive, scored))
    ends = np.stack([names[first], names[last]], axis=1) & ((1 << HELD_OUT_BIT) - 1)
    squares = np.bincount(group, centred**2, minlength=groups)
    found = _frequent(postings, piece, responses, group, (alive, scored, centred))
    return Counts(ends, names[first] >> HELD_OUT_BIT == 1, responses, known, squares, *found)


def _groups(held_out: Array) -> tuple[Array, Array, Array]:
    """Return the group of each step, and the first and last step of each group, as indices.

    ``held_out`` is [S] 0 or 1 for each step of a split, ascending.
    """
    group, groups = np.empty(len(held_out), np.int64), 0
    for split in np.flatnonzero(np.bincount(held_out)):
        mine = np.flatnonzero(held_out == split)
        size = -(-len(mine) // GROUPS)
        group[mine] = groups + np.arange(len(mine)) // size
        groups = int(group[mine[-1]]) + 1
    first = np.searchsorted(group, np.arange(groups))
    return group, first, np.append(first[1:], len(group)) - 1


def _is_frequent(counts: Array, responses: Array) -> Array:
    """Return [K] whether a feature is in enough responses of any group, given its [K, G] counts."""
    return np.asarray(np.any(counts >= np.maximum(SHARE * responses, MIN_RESPONSES), axis=1))


def _frequent(
    postings: Postings, piece: Piece, responses: Array, group: Array, values: tuple[Array, Array, Array]
) -> tuple[Array, ...]:
    """Return the frequent features, and the sum of each of the values over the responses per group that have each.

    The first of the values counts the responses.
    """
    found = [(postings.feature[:0], *(np.empty((0, len(responses))) for _ in values))]
    # Process the features in portions to limit the use of memory.
    start = np.concatenate([[0], np.cumsum(postings.counts)]).astype(np.int64)
    bounds = np.unique(np.append(np.searchsorted(start, np.arange(0, start[-1], PART)), len(postings.feature)))
    for first, stop in pairwise(bounds.tolist()):
        feature = np.repeat(np.arange(stop - first), postings.counts[first:stop])
        row = postings.rows[start[first] : start[stop]].astype(np.int64) - piece.first % BLOCK
        cell = feature * len(responses) + group[row]
        shape = (stop - first, len(responses))
        sums = [np.bincount(cell, one[row], minlength=shape[0] * shape[1]).reshape(shape) for one in values]
        kept = _is_frequent(sums[0], responses)
        found.append((postings.feature[first:stop][kept], *(one[kept] for one in sums)))
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def write_counts(folder: Path, state: State, piece: Piece, postings: Postings) -> None:
    """Write the counts of a piece next to its words."""
    counts = counted(Snapshot(folder, state), piece, postings)
    groups = len(counts.responses)
    head = [*counts.steps.T, counts.held_out, counts.responses, counts.scored, counts.squares]
    numbers = np.concatenate([np.asarray(values, np.float64) for values in head])
    table = pa.table(
        {
            "feature": counts.feature.astype(np.uint32),
            "count": pa.FixedSizeListArray.from_arrays(counts.counts.astype(np.uint32).ravel(), groups),
            "scored": pa.FixedSizeListArray.from_arrays(counts.scored_counts.astype(np.uint32).ravel(), groups),
            "reward": pa.FixedSizeListArray.from_arrays(counts.reward.astype(np.float32).ravel(), groups),
        }
    ).replace_schema_metadata({"groups": numbers.tobytes()})
    write_table(folder / piece.name("patterns"), table)


@lru_cache(maxsize=512)
def read_counts(folder: Path, piece: Piece) -> Counts:
    """Read the counts of a piece."""
    table, _ = mapped_table(folder / piece.name("patterns"))
    head = np.frombuffer(table.schema.metadata[b"groups"]).reshape(6, -1)
    groups = head.shape[1]
    feature, *sums = (
        np.concatenate([np.empty(0), *(_flat(chunk) for chunk in table[name].chunks)]) for name in table.column_names
    )
    steps = head[:2].T.astype(np.int64)
    count, scored, reward = (one.reshape(-1, groups) for one in sums)
    return Counts(steps, head[2] == 1, head[3], head[4], head[5], feature.astype(np.int64), count, scored, reward)


def _flat(chunk: pa.Array) -> Array:
    array: Array = (chunk.flatten() if pa.types.is_fixed_size_list(chunk.type) else chunk).to_numpy()
    return array
