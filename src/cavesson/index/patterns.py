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

GROUPS = 16
"""Most groups of steps that a piece is counted in."""
SHARE = 0.01
"""A feature is kept that so many of the responses of any group have."""
FEWEST = 2
"""But at least so many responses."""


class Counts(NamedTuple):
    """Counts over the responses of one piece of the run, in groups of consecutive steps.

    The mean of the step is subtracted from each reward. Otherwise, a feature that is frequent when all rewards are high
    would seem to raise them.
    """

    steps: Array
    """[G, 2] first and last step of each group."""
    responses: Array
    """[G] how many there are."""
    squares: Array
    """[G] sum of the squares of their rewards."""
    feature: Array
    """[K] numbers of the features."""
    counts: Array
    """[K, G] responses that have each."""
    reward: Array
    """[K, G] sum of their rewards."""


def counted(snapshot: Snapshot, piece: Piece, postings: Postings) -> Counts:
    """Count the features of a piece, without superseded rollouts and those without a reward."""
    rows = slice(piece.first, piece.stop)
    step, reward = snapshot.raw("step")[rows], snapshot.column("reward")[rows].astype(np.float64)
    counts = np.isfinite(reward)
    if snapshot.alive is not None:
        counts &= snapshot.alive[rows]
    reward = np.where(counts, reward, 0)
    names, of_step = np.unique(step, return_inverse=True)
    per_step = np.bincount(of_step, counts, minlength=len(names))
    mean = np.bincount(of_step, reward, minlength=len(names)) / np.maximum(per_step, 1)
    centred = np.where(counts, reward - mean[of_step], 0)
    size = -(-len(names) // GROUPS)
    group, groups = of_step // size, -(-len(names) // size)
    responses = np.bincount(group, counts, minlength=groups)
    ends = np.stack([names[::size], np.append(names[size - 1 :: size], names[-1:])[:groups]], axis=1)
    squares = np.bincount(group, centred**2, minlength=groups)
    found = _frequent(postings, piece, responses, group, counts, centred)
    return Counts(ends, responses, squares, *found)


def _frequent(
    postings: Postings, piece: Piece, responses: Array, group: Array, counts: Array, centred: Array
) -> tuple[Array, Array, Array]:
    """Return the frequent features, the number of responses per group that have each, and the sum of their rewards."""
    found = [(postings.feature[:0], np.empty((0, len(responses))), np.empty((0, len(responses))))]
    # Process the features in portions to limit the use of memory.
    start = np.concatenate([[0], np.cumsum(postings.counts)]).astype(np.int64)
    bounds = np.unique(np.append(np.searchsorted(start, np.arange(0, start[-1], PART)), len(postings.feature)))
    for first, stop in pairwise(bounds.tolist()):
        feature = np.repeat(np.arange(stop - first), postings.counts[first:stop])
        row = postings.rows[start[first] : start[stop]].astype(np.int64) - piece.first % BLOCK
        cell = feature * len(responses) + group[row]
        shape = (stop - first, len(responses))
        count, sums = (
            np.bincount(cell, values[row], minlength=shape[0] * shape[1]).reshape(shape) for values in (counts, centred)
        )
        kept = np.any(count >= np.maximum(SHARE * responses, FEWEST), axis=1)
        found.append((postings.feature[first:stop][kept], count[kept], sums[kept]))
    features, count, sums = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return features, count, sums


def write_counts(folder: Path, state: State, piece: Piece, postings: Postings) -> None:
    """Write the counts of a piece next to its words."""
    counts = counted(Snapshot(folder, state), piece, postings)
    groups = len(counts.responses)
    head = [counts.steps[:, 0], counts.steps[:, 1], counts.responses, counts.squares]
    numbers = np.concatenate([np.asarray(values, np.float64) for values in head])
    table = pa.table(
        {
            "feature": counts.feature.astype(np.uint32),
            "count": pa.FixedSizeListArray.from_arrays(counts.counts.astype(np.uint32).ravel(), groups),
            "reward": pa.FixedSizeListArray.from_arrays(counts.reward.astype(np.float32).ravel(), groups),
        }
    ).replace_schema_metadata({"groups": numbers.tobytes()})
    write_table(folder / piece.name("patterns"), table)


@lru_cache(maxsize=512)
def read_counts(folder: Path, piece: Piece) -> Counts:
    """Read the counts of a piece."""
    table, _ = mapped_table(folder / piece.name("patterns"))
    head = np.frombuffer(table.schema.metadata[b"groups"]).reshape(4, -1)
    groups = head.shape[1]
    feature, count, reward = (
        np.concatenate([np.empty(0), *(_flat(chunk) for chunk in table[name].chunks)]) for name in table.column_names
    )
    steps = head[:2].T.astype(np.int64)
    return Counts(
        steps, head[2], head[3], feature.astype(np.int64), count.reshape(-1, groups), reward.reshape(-1, groups)
    )


def _flat(chunk: pa.Array) -> Array:
    array: Array = (chunk.flatten() if pa.types.is_fixed_size_list(chunk.type) else chunk).to_numpy()
    return array
