"""The rollouts whose responses share the most n-grams with a given one."""

from typing import Any

import numpy as np
from pydantic import Field

from cavesson.board.rollout import RolloutQuery, read, split_of
from cavesson.board.rows import lines
from cavesson.board.runs import Board, OpenRun
from cavesson.board.selection import SplitQuery
from cavesson.index.columns import Array
from cavesson.index.search import dictionary
from cavesson.index.snapshot import Snapshot
from cavesson.index.texts import LENGTH
from cavesson.record.splits import Split
from cavesson.text.word_hashes import hashes, pieces

MAX_WORDS = 48
MIN_WORDS = 4
COMMON = 0.02
"""Share of the responses that have a word which is looked for only if there are hardly others."""
CANDIDATES = 100
SIZE = 3
"""Words of an n-gram."""


class SimilarQuery(RolloutQuery, SplitQuery):
    limit: int = Field(20, ge=1, le=100)
    """Maximum number of rollouts."""


def similar(board: Board, query: SimilarQuery) -> dict[str, Any]:
    """Return rollouts by the share of n-grams that the beginnings of their responses share with that of the given one.

    The candidates are the responses of the split that share the most of its rare words; rarer words have a higher
    weight.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    row = read(run, query.step, query.sample).row
    response = (row["response"] or "")[:LENGTH]
    rows = _candidates(snapshot, query.split, response, own=split_of(row) == query.split)
    if not len(rows):
        return {"rows": []}
    here = (snapshot.raw("step")[rows] == query.step) & (snapshot.raw("sample")[rows] == query.sample)
    rows = rows[~here]
    shared = _shared(run, snapshot, rows, response)
    best = np.argsort(-shared, kind="stable")[: query.limit]
    best = best[shared[best] > 0]
    found = lines(run, snapshot, rows[best])
    return {"rows": [line | {"shared": float(share)} for line, share in zip(found, shared[best], strict=True)]}


def _candidates(snapshot: Snapshot, split: Split, response: str, own: bool) -> Array:
    """Return the rows of a split that share the most rare words with a response, which may be ``own`` to the split."""
    if not snapshot.state.pieces:
        return np.empty(0, np.int64)
    known = dictionary(snapshot.folder, snapshot.state.pieces)
    features = known.numbers(hashes(pieces([response])))
    count, rows = known.totals(split)[features], snapshot.count(split)
    shared = np.flatnonzero(count > own)
    rarest = shared[np.argsort(count[shared], kind="stable")[:MAX_WORDS]]
    # Words that occur in many responses are not very informative and take long to look up.
    rarest = rarest[(count[rarest] < COMMON * rows) | (np.arange(len(rarest)) < MIN_WORDS)]
    score = known.scores(features[rarest], np.log1p(rows / count[rarest]), snapshot.rows)
    if (mask := snapshot.of(split)) is not None:
        score[~mask] = 0
    most = min(CANDIDATES + 1, len(score))
    best = np.argpartition(-score, most - 1)[:most]
    return best[score[best] > 0]


def _shared(run: OpenRun, snapshot: Snapshot, rows: Array, response: str) -> Array:
    """Return for each row the Jaccard index of its n-grams and those of a text."""
    if not len(rows):
        return np.empty(0)
    own = _ngrams(response)
    others = [_ngrams(text) for text in run.texts(snapshot, rows).response]
    return np.array([len(own & other) / max(len(own | other), 1) for other in others])


def _ngrams(text: str) -> set[tuple[int, ...]]:
    found = hashes(pieces([text])).tolist()
    size = min(SIZE, max(len(found), 1))
    return {tuple(found[i : i + size]) for i in range(len(found) - size + 1)}
