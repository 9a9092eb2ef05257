"""The words, n-grams and characters that spread during training, and how they relate to the reward."""

from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from cavesson.board.buckets import Buckets, buckets
from cavesson.board.runs import Board
from cavesson.board.selection import Page, SplitQuery
from cavesson.index.columns import Array
from cavesson.index.patterns import read_counts
from cavesson.index.search import Dictionary, dictionary
from cavesson.index.snapshot import Snapshot
from cavesson.record.splits import OTHER, Split
from cavesson.sorted_arrays import distinct
from cavesson.text.features import KINDS
from cavesson.text.reward_effect import RewardEffect, effect_weight, reward_effect
from cavesson.text.words import fold

ENDS = 0.1
"""Growth is from this share of the responses, the first, to the same share of the last."""
NORMAL_95 = 1.959964
LETTER = r"^[^\P{L}\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}]\p{M}*$"


class PatternsQuery(SplitQuery, Page):
    kind: Literal["all", "word", "ngram", "character"] = "word"
    """Kind of pattern; of all kinds, letters are left out, and characters that are words."""
    sort: Literal["growth", "decline", "reward_effect", "frequency"] = "growth"
    """Sort order, descending."""
    buckets: int = Field(40, ge=2, le=200)
    """Maximum number of groups of steps."""
    q: str = Field("", max_length=200)
    """Only patterns that contain this text, ignoring case."""
    limit: int = Field(100, ge=1, le=1_000)
    """Maximum number of patterns."""


class Table(NamedTuple):
    """Counts of a split of the whole run by groups of steps."""

    grouping: Buckets
    responses: Array
    """[B]"""
    feature: Array
    """[K]"""
    counts: Array
    """[K, B] responses that have the feature."""
    first: Array
    """[K] share of the first responses that have it."""
    last: Array
    """[K] share of the last."""
    effect: RewardEffect
    """[K] on the reward, within steps."""


def patterns(board: Board, query: PatternsQuery) -> dict[str, Any]:
    """Return the features in the requested order, with the share of responses that have them over the run."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    pieces = snapshot.state.pieces
    key = (pieces, query.split, query.buckets)
    table = run.cache.get("patterns", key, lambda: tabled(snapshot, query.split, query.buckets), most=2)
    if table is None:
        return {"steps": [], "total": 0, "patterns": [], "left_out": snapshot.count(OTHER[query.split])}
    known = dictionary(snapshot.folder, pieces)
    found = _sorted(table, query.sort)
    if query.kind == "all":
        telling = run.cache.get("telling", key, lambda: _telling(known, table.feature), most=2)
        found = found[telling[found]]
    found = found[_wanted(known, table.feature[found], query)]
    page = found[query.offset : query.offset + query.limit]
    return {
        "steps": table.grouping.pairs(),
        "total": len(found),
        "patterns": [_line(table, known, i) for i in page.tolist()],
        "left_out": 0,
    }


def _sorted(table: Table, sort: str) -> Array:
    """Return the indices into the table in the requested order, largest first."""
    growth = table.last - table.first
    low, frequency = table.effect.value - NORMAL_95 * table.effect.error, table.counts.sum(axis=1)
    by = {"growth": growth, "decline": -growth, "reward_effect": low, "frequency": frequency}
    order = np.argsort(-by[sort], kind="stable")
    return np.asarray(order[np.isfinite(by[sort][order])])


def _telling(known: Dictionary, feature: Array) -> Array:
    """Return [K] which features add to the others: not letters, nor characters that are also a word.

    Letters of alphabets follow their words.
    """
    kinds = known.kinds[feature]
    characters, words = (np.flatnonzero(kinds == KINDS.index(kind)) for kind in ("character", "word"))
    texts = known.texts.take(pa.array(feature[characters]))
    among = known.texts.take(pa.array(feature[words]))
    twice = pc.is_in(texts, value_set=among.filter(pc.is_in(among, value_set=texts)))
    telling = np.ones(len(feature), np.bool_)
    telling[characters] = ~pc.or_(twice, pc.match_substring_regex(texts, LETTER)).to_numpy(zero_copy_only=False)
    return telling


def _wanted(known: Dictionary, feature: Array, query: PatternsQuery) -> Array:
    """Return for each feature whether it has the requested kind and contains the requested text."""
    wanted = np.ones(len(feature), np.bool_)
    if query.kind != "all":
        wanted &= known.kinds[feature] == KINDS.index(query.kind)
    if text := fold(query.q.strip()):
        wanted &= pc.match_substring(known.texts.take(pa.array(feature)), text).to_numpy()
    return wanted


def _line(table: Table, known: Dictionary, i: int) -> dict[str, Any]:
    feature = int(table.feature[i])
    first, last = float(table.first[i]), float(table.last[i])
    effect, error, in_sd = (float(values[i]) for values in table.effect)
    return {
        "text": known.texts[feature].as_py(),
        "kind": KINDS[known.kinds[feature]],
        "share": table.counts[i] / np.maximum(table.responses, 1),
        "first": first,
        "last": last,
        "growth": last - first,
        "reward_effect": effect,
        "reward_effect_sd": in_sd,
        "reward_effect_interval": [effect - NORMAL_95 * error, effect + NORMAL_95 * error],
        "rows": int(table.counts[i].sum()),
    }


def tabled(snapshot: Snapshot, split: Split, most: int) -> Table | None:
    """Sum the counts of a split in all pieces of the index; None if it has no responses there."""
    counts = [read_counts(snapshot.folder, piece).of(split) for piece in snapshot.state.pieces]
    counts = [part for part in counts if len(part.responses)]
    if not counts:
        return None
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
        weight[place] += effect_weight(part.scored_counts, part.scored)
    squares = sum(part.squares.sum() for part in counts)
    effect = reward_effect(reward, weight, squares, sum(part.scored.sum() for part in counts))
    return Table(grouping, responses, feature, count, *_ends(count, responses), effect)


def _ends(counts: Array, responses: Array) -> tuple[Array, Array]:
    """Return the share of the first and of the last responses that have each feature."""
    reached = np.cumsum(responses)
    total = reached[-1]
    first = reached - responses < ENDS * total
    last = reached > (1 - ENDS) * total
    shares = [counts[:, part].sum(axis=1) / max(responses[part].sum(), 1) for part in (first, last)]
    return shares[0], shares[1]
