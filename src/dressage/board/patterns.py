"""Which words, n-grams and characters spread while the model learns, and what the reward thinks of them."""

from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from dressage.board.buckets import Buckets, buckets
from dressage.board.runs import Board
from dressage.board.selection import RunQuery
from dressage.index.columns import Array
from dressage.index.features import KINDS
from dressage.index.patterns import Counts, read_counts
from dressage.index.search import dictionary
from dressage.index.sets import distinct
from dressage.index.snapshot import Snapshot

ENDS = 0.1
"""Growth is from this share of the responses, the first, to the same share of the last."""
NORMAL_95 = 1.959964


class PatternsQuery(RunQuery):
    kind: Literal["all", "word", "ngram", "character"] = "word"
    """Of what."""
    sort: Literal["growth", "decline", "lift", "frequency"] = "growth"
    """By what, the largest first."""
    buckets: int = Field(40, ge=2, le=200)
    """Most groups of steps."""
    limit: int = Field(100, ge=1, le=1_000)
    """How many to return at most."""


class Table(NamedTuple):
    """Counts of the whole run by groups of steps."""

    grouping: Buckets
    responses: Array
    """[B]"""
    squares: float
    feature: Array
    """[K]"""
    counts: Array
    """[K, B] responses that have the feature."""
    lift: Array
    """[K] mean reward with it − without it, within steps."""
    weight: Array
    """[K] how many pairs of responses that rests on, in a way: its variance is that of a reward / weight."""


def patterns(board: Board, query: PatternsQuery) -> dict[str, Any]:
    """Returns the features by growth, lift or frequency, with their share of the responses over the run."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    pieces = snapshot.state.pieces
    if not pieces:
        return {"steps": [], "patterns": [], "indexed": run.indexed()}
    table = run.memory.get("patterns", (pieces, query.buckets), lambda: tabled(snapshot, query.buckets), most=2)
    first, last = _ends(table)
    with np.errstate(all="ignore"):
        sigma = np.sqrt(np.maximum(table.squares - table.lift**2 * table.weight, 0) / table.responses.sum())
        half = NORMAL_95 * sigma / np.sqrt(table.weight)
    frequency = table.counts.sum(axis=1)
    by = {"growth": last - first, "decline": first - last, "lift": table.lift - half, "frequency": frequency}[
        query.sort
    ]
    known = dictionary(snapshot.folder, pieces)
    wanted = np.isfinite(by)
    if query.kind != "all":
        wanted &= known.kinds[table.feature] == KINDS.index(query.kind)
    found = np.flatnonzero(wanted)
    found = found[np.argsort(-by[found], kind="stable")][: query.limit]
    lines = [
        {
            "text": known.texts[int(table.feature[i])].as_py(),
            "kind": KINDS[known.kinds[table.feature[i]]],
            "share": table.counts[i] / np.maximum(table.responses, 1),
            "first": float(first[i]),
            "last": float(last[i]),
            "growth": float(last[i] - first[i]),
            "lift": float(table.lift[i]),
            "lift_interval": [float(table.lift[i] - half[i]), float(table.lift[i] + half[i])],
            "rows": int(frequency[i]),
        }
        for i in found
    ]
    return {"steps": table.grouping.pairs(), "patterns": lines, "indexed": run.indexed()}


def tabled(snapshot: Snapshot, most: int) -> Table:
    """Adds up the counts of all pieces of the index."""
    counts = [read_counts(snapshot.folder, piece) for piece in snapshot.state.pieces]
    grouping = buckets(np.concatenate([part.steps[:, 0] for part in counts]), most)
    ends = np.concatenate([part.steps[:, 1] for part in counts])
    grouping = Buckets(grouping.first, np.append(grouping.first[1:] - 1, ends.max()))
    feature = distinct(np.concatenate([part.feature for part in counts]))
    size = len(grouping.first)
    count, responses = np.zeros((len(feature), size)), np.zeros(size)
    reward, weight = np.zeros(len(feature)), np.zeros(len(feature))
    for part in counts:
        place, where = np.searchsorted(feature, part.feature), grouping.of(part.steps[:, 0])
        np.add.at(responses, where, part.responses)
        for group, bucket in enumerate(where):
            count[place, bucket] += part.counts[:, group]
        reward[place] += part.reward.sum(axis=1)
        weight[place] += _weight(part)
    with np.errstate(all="ignore"):
        lift = reward / weight
    return Table(grouping, responses, sum(part.squares.sum() for part in counts), feature, count, lift, weight)


def _weight(part: Counts) -> Array:
    """Returns Σ n₁ n₀ / n over the groups, n₁ responses with a feature and n₀ without.

    Rewards being counted from their mean, those without it sum to minus those with it, S. So the difference of the
    means is S / n₁ + S / n₀ = S · n / (n₁ n₀), and its variance that of a reward times n / (n₁ n₀).
    """
    without = part.responses - part.counts
    weight: Array = (part.counts * without / np.maximum(part.responses, 1)).sum(axis=1)
    return weight


def _ends(table: Table) -> tuple[Array, Array]:
    """Returns the share of the first and of the last responses that have each feature."""
    reached = np.cumsum(table.responses)
    total = reached[-1]
    first = reached - table.responses < ENDS * total
    last = reached > (1 - ENDS) * total
    shares = [table.counts[:, part].sum(axis=1) / max(table.responses[part].sum(), 1) for part in (first, last)]
    return shares[0], shares[1]
