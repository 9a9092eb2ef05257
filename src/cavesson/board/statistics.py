"""What sets a selection apart from the rest: rewards, lengths and KL, finish reasons, tools and words."""

from typing import Any, NamedTuple

import numpy as np

from cavesson.board.buckets import Buckets, buckets
from cavesson.board.runs import Board, OpenRun
from cavesson.board.search import matching
from cavesson.board.selection import Selection, base
from cavesson.index.columns import MISSING, Array
from cavesson.index.snapshot import Snapshot
from cavesson.ops.intervals import difference_interval, proportion_interval
from cavesson.text.features import CHARACTER, features

COLUMNS = ("reward", "length", "kl_k1")
POINTS = 60
"""Of the curves."""
MAX_SHARES = 12
"""Tools, or words, that are compared."""
SAMPLED = 2_000
"""Responses of either side whose words are compared."""


class StatisticsQuery(Selection):
    details: bool = False
    """Also return curves over the steps, and compare finish reasons, tools, and the words of a sample of both sides."""


class Sides(NamedTuple):
    """The rollouts that a selection chooses from."""

    rows: Array
    """[N] of the split and steps, ascending."""
    chosen: Array
    """[N] which of them are selected."""
    prompt: Array
    """[N] their prompts, numbered from 0."""


def statistics(board: Board, query: StatisticsQuery) -> dict[str, Any]:
    """Compare the selected rollouts with the rest of the same split and steps.

    ``difference`` is a mean, or the share of rollouts, of the selected minus that of the rest, with the bounds of its
    95 % interval, in which the prompts count as independent; ``interval`` has those of the selected share (Clopper and
    Pearson). ``at_most`` says that a search is not finished.
    """
    run = board.run(query.run)
    snapshot = run.snapshot()
    found = matching(run, snapshot, query)
    sides = _sides(snapshot, query, found.mask)
    selected = int(np.count_nonzero(sides.chosen))
    said = {
        "selected": selected,
        "rest": len(sides.rows) - selected,
        "at_most": found.most is not None,
        "columns": {name: _column(snapshot, sides, name) for name in COLUMNS if name in snapshot.names},
    }
    return said | _details(run, snapshot, sides) if query.details else said


def _details(run: OpenRun, snapshot: Snapshot, sides: Sides) -> dict[str, Any]:
    grouping = buckets(snapshot.raw("step")[sides.rows], POINTS) if len(sides.rows) else Buckets(*np.empty((2, 0)))
    is_divided = sides.chosen.any() and not sides.chosen.all()
    return {
        "steps": grouping.pairs(),
        "curves": {name: _curves(snapshot, sides, name, grouping) for name in COLUMNS if name in snapshot.names},
        "finish_reasons": _finish_reasons(snapshot, sides),
        "tools": _tools(snapshot, sides),
        "words": _words(run, snapshot, sides) if is_divided else [],
        "sampled": SAMPLED,
    }


def _sides(snapshot: Snapshot, query: Selection, mask: Array | None) -> Sides:
    whole = base(snapshot, query)
    rows = np.arange(snapshot.rows) if whole is None else np.flatnonzero(whole)
    chosen = np.ones(len(rows), np.bool_) if mask is None else mask[rows]
    prompt = snapshot.raw("prompt")[rows].astype(np.int64) if len(rows) else rows
    # Rollouts without a prompt are one group.
    return Sides(rows, chosen, np.where(prompt < 0, snapshot.state.prompts, prompt))


def _known(snapshot: Snapshot, sides: Sides, name: str) -> tuple[Array, Sides]:
    """Return the finite values of a column and the rollouts that have them."""
    values = snapshot.take(name, sides.rows).astype(np.float64)
    there = np.isfinite(values)
    if there.all():
        return values, sides
    return values[there], Sides(sides.rows[there], sides.chosen[there], sides.prompt[there])


def _column(snapshot: Snapshot, sides: Sides, name: str) -> dict[str, Any]:
    """Return the means of both sides and their difference."""
    values, known = _known(snapshot, sides, name)
    parts = {"selected": values[known.chosen], "rest": values[~known.chosen]}
    means = {side: float(own.mean()) if len(own) else None for side, own in parts.items()}
    return {"difference": _difference(values, known), **means}


def _curves(snapshot: Snapshot, sides: Sides, name: str, grouping: Buckets) -> dict[str, Array]:
    """Return the means of both sides in each group of steps."""
    values, known = _known(snapshot, sides, name)
    where = grouping.of(snapshot.raw("step")[known.rows])
    curves = {}
    for side, mine in (("selected", known.chosen), ("rest", ~known.chosen)):
        with np.errstate(all="ignore"):
            count = np.bincount(where[mine], minlength=len(grouping.first))
            curves[side] = np.bincount(where[mine], values[mine], len(grouping.first)) / count
    return curves


def _difference(values: Array, sides: Sides) -> list[float | None] | None:
    if sides.chosen.all() or not sides.chosen.any():
        return None
    found = difference_interval(values, sides.chosen, sides.prompt)
    return [found.mean, found.low, found.high]


def _finish_reasons(snapshot: Snapshot, sides: Sides) -> list[dict[str, Any]]:
    if "finish_reason" not in snapshot.names or not len(sides.rows):
        return []
    codes, known = snapshot.raw("finish_reason")[sides.rows], snapshot.state.codes["finish_reason"]
    there = codes != MISSING["|u1"]
    own = Sides(sides.rows[there], sides.chosen[there], sides.prompt[there])
    return _shares({text: codes[there] == code for code, text in enumerate(known)}, own)


def _tools(snapshot: Snapshot, sides: Sides) -> list[dict[str, Any]]:
    if not snapshot.state.calls or not len(sides.rows):
        return []
    calls, called = snapshot.calls, {}
    for number, name in enumerate(snapshot.state.tools):
        mask = np.zeros(snapshot.rows, np.bool_)
        mask[calls.row[calls.tool == number]] = True
        called[name] = mask[sides.rows]
    return _shares(called, sides)


def _words(run: OpenRun, snapshot: Snapshot, sides: Sides) -> list[dict[str, Any]]:
    """Return the words and n-grams whose shares differ most, compared to the error of the difference."""
    generator = np.random.default_rng(0)
    parts = [np.flatnonzero(side) for side in (sides.chosen, ~sides.chosen)]
    some = np.sort(np.concatenate([generator.permutation(part)[:SAMPLED] for part in parts]))
    sample = Sides(sides.rows[some], sides.chosen[some], sides.prompt[some])
    found, text = features(run.texts(snapshot, sample.rows).response)
    chosen = np.add.reduceat(sample.chosen[found.documents], np.cumsum(found.counts) - found.counts, dtype=np.int64)
    sizes = np.array([np.count_nonzero(sample.chosen), np.count_nonzero(~sample.chosen)])
    shares = np.stack([chosen, found.counts - chosen]) / sizes[:, None]
    error = np.sqrt((shares * (1 - shares) / sizes[:, None]).sum(axis=0) + 1 / sizes.min() ** 2)
    score = np.where(found.kind == CHARACTER, 0, np.abs(shares[0] - shares[1]) / error)
    first = np.cumsum(found.counts) - found.counts
    wanted: dict[str, Array] = {}
    for one in np.argsort(-score, kind="stable")[:MAX_SHARES].tolist():
        mask = np.zeros(len(sample.rows), np.bool_)
        mask[found.documents[first[one] : first[one] + found.counts[one]]] = True
        wanted[text[found.start[one] : found.stop[one]]] = mask
    return _shares(wanted, sample)


def _shares(there: dict[str, Array], sides: Sides) -> list[dict[str, Any]]:
    """Return the share of each side in which something is there, the largest difference first."""
    many, others = int(np.count_nonzero(sides.chosen)), int(np.count_nonzero(~sides.chosen))
    lines: list[dict[str, Any]] = []
    for name, mask in there.items():
        with_it, without = int(np.count_nonzero(mask & sides.chosen)), int(np.count_nonzero(mask & ~sides.chosen))
        interval = proportion_interval(with_it, many) if many else None
        lines.append(
            {
                "name": name,
                "selected": with_it / many if many else None,
                "interval": interval and [interval.low, interval.high],
                "rest": without / others if others else None,
                "difference": _difference(mask.astype(np.float64), sides),
            }
        )
    lines.sort(key=lambda line: -abs((line["difference"] or [0])[0]))
    return lines[:MAX_SHARES]
