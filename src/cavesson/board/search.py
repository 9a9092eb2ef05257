"""Search: immediate results from the index, and a search of the texts in the background for the rest."""

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cavesson.board.expressions import compiled, required
from cavesson.board.runs import Board, OpenRun
from cavesson.board.scanner import ScannedRows, spans
from cavesson.board.selection import Order, Selection, both, first_of, selected
from cavesson.errors import UserError
from cavesson.index.columns import Array
from cavesson.index.search import candidates, holding, is_exact
from cavesson.index.snapshot import Snapshot
from cavesson.sorted_arrays import distinct

PATIENCE = 0.06
"""Seconds that a request waits for the background."""
FORGOTTEN = 5.0
"""Seconds without a request after which a search in the background stops."""
PORTION = 16_384
"""Rows that are given away at once, more than can be looked at in a moment: first those at the top of a table."""
MAX_STEPS = 10_000_000
"""From the first to the last step, to be counted without sorting them."""


class Matching(NamedTuple):
    """The result of a selection, as far as it is known."""

    mask: Array | None
    """[rows] the rows that are known to match; None means all."""
    most: int | None
    """How many rows can match at most, while not all were looked at."""
    stopped: str | None = None
    """Why the rest is not looked at."""


def matching(
    run: OpenRun, snapshot: Snapshot, query: Selection, order: Order | None = None, enough: int = 0
) -> Matching:
    """Return the rows that match the steps, the filter, the stars and the search text.

    The top of the table that shows the rows in ``order`` is searched first; with ``enough`` hits there, the request
    does not wait for more.
    """
    mask = selected(run, snapshot, query)
    # What is not indexed yet can match as well.
    later = max(0, snapshot.state.recorded - snapshot.rows)
    if not query.text or query.within != "response":
        return Matching(mask, _count(mask, snapshot) + later if later else None)
    key = (query.text, query.regex)
    search = run.cache.latest("search", key, lambda old: _search(old, run, snapshot, *key))
    top = None if order is None else lambda left: first_of(order, both(mask, left), PORTION)
    found, left = search.ask(top, enough)
    known, open_ = both(mask, found), int(np.count_nonzero(both(mask, left)))
    stopped = search.stopped if open_ else None
    open_ += later + _count(mask, snapshot, first=snapshot.state.text_rows)
    return Matching(known, open_ + int(np.count_nonzero(known)) if open_ else None, stopped)


def _count(mask: Array | None, snapshot: Snapshot, first: int = 0) -> int:
    """Return how many rows from ``first`` on a mask keeps; None keeps all."""
    return snapshot.rows - first if mask is None else int(np.count_nonzero(mask[first:]))


def _search(old: "Search | None", run: OpenRun, snapshot: Snapshot, text: str, regex: bool) -> "Search":
    """Return an up-to-date search: the old one if the index has not grown, else a new one that reuses its results."""
    if old is not None and old.snapshot.state == snapshot.state:
        return old
    new = Search(run, snapshot, text, regex)
    if old is not None:
        new.take_over(old)
    return new


class Search:
    """One search text in one snapshot of a run. A background thread searches what the index cannot answer."""

    def __init__(self, run: OpenRun, snapshot: Snapshot, text: str, regex: bool) -> None:
        self.run = run
        self.snapshot = snapshot
        self.pattern = compiled(text, regex)
        self.stopped: str | None = None
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None
        self._progress = threading.Condition()
        self._first: Array = np.empty(0, np.int64)
        self._enough = 0
        self._texts = required(text) if regex else [frozenset({text})]
        self.hits: Array = np.zeros(snapshot.rows, np.bool_)
        self.left: Array = np.arange(snapshot.rows) < snapshot.state.text_rows
        if snapshot.alive is not None:
            self.left &= snapshot.alive
        self._holding = holding(snapshot, text) if not regex and is_exact(text) else None

    def ask(self, top: Callable[[Array], Array] | None = None, enough: int = 0) -> tuple[Array, Array]:
        """Keep the search active, and wait briefly for results that are not known yet.

        Of the [rows] that may match, ``top`` selects those to search first (None = as before); waiting stops after
        ``enough`` hits among these.

        Returns:
            [rows] which rows match, and which may match because they have not been searched yet.
        """
        with self._progress:
            self._asked = time.monotonic()
            if self.left.any() and self.stopped is None:
                if top is not None:
                    self._first, self._enough = top(self.left), enough
                self.run.searching = self
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._go_on, daemon=True, name="search")
                    self._thread.start()
                # Wait a little longer if there is no hit to show yet.
                _ = self._progress.wait_for(self._done, PATIENCE) or self._progress.wait_for(self.hits.any, PATIENCE)
            return self.hits.copy(), self.left.copy()

    def take_over(self, old: "Search") -> None:
        """Take over the results of an earlier search for the same text, as responses never change."""
        known = min(old.snapshot.state.text_rows, len(self.left))  # a slow request may have an older snapshot
        with old._progress:
            looked_at = ~old.left[:known]
            self.hits[:known] |= old.hits[:known] & looked_at
            self.left[:known] &= ~looked_at
            old._asked = -FORGOTTEN

    def _done(self) -> bool:
        """Return whether the search is complete, stopped, or has enough hits among the first rows."""
        if self._holding is not None:
            return self.stopped is not None or not self.left.any()
        looked = ~self.left[self._first]
        enough = looked.all() or np.count_nonzero(self.hits[self._first] & looked) >= self._enough
        return self.stopped is not None or bool(enough)

    def _go_on(self) -> None:
        """Search on while there are requests for this text and none for another."""
        try:
            while self.left.any() and self.run.searching is self and time.monotonic() - self._asked < FORGOTTEN:
                if self._holding is None:
                    self._read(self._next())
                    # Frequent texts are found at the top of the table before the index has narrowed the search.
                    self._narrow()
                else:
                    self._take(*next(self._holding))
        except TimeoutError:
            self._stop("the expression takes too long on some responses; try a simpler one")
        except (UserError, OSError, ValueError) as error:
            self._stop(" ".join(str(error).split()))

    def _next(self) -> Array:
        """Return the rows to search next."""
        with self._progress:
            first = self._first[self.left[self._first]]
            return first if len(first) else np.flatnonzero(self.left)[:PORTION]

    def _read(self, rows: Array) -> None:
        """Search the texts of the first of some rows."""
        looked = self.run.scanner.scan(ScannedRows(self.run.record.folder, self.run.folder, rows), self.pattern)
        with self._progress:
            self.hits[rows[looked.places]] = True
            self.left[rows[: looked.stop]] = False
            self._progress.notify_all()

    def _take(self, rows: slice, held: Array) -> None:
        """Add the results of the index for some rows."""
        with self._progress:
            self.hits[rows] |= held
            self.left[rows] = False
            self._progress.notify_all()

    def _narrow(self) -> None:
        """Narrow the search, once, to the rows that can match according to the index."""
        texts, self._texts = self._texts, []
        for some in texts if self.left.any() else []:
            possible = candidates(self.snapshot, some)
            with self._progress:
                self.left &= possible
                self._progress.notify_all()

    def _stop(self, reason: str) -> None:
        with self._progress:
            self.stopped = reason
            self._progress.notify_all()


def spans_of(run: OpenRun, texts: list[str], query: Selection) -> list[tuple[int, int] | None]:
    """Return the start and length in bytes of the first hit in each response; None if there is no hit."""
    shown: list[tuple[int, int] | None] = [None] * len(texts)
    try:
        # Plain text is found quickly; a regular expression can exceed the time limit.
        search = run.scanner.spans if query.regex else spans
        found = search(texts, compiled(query.text, query.regex))
    except TimeoutError:
        return shown
    for place, start, length in zip(found.places.tolist(), found.start.tolist(), found.length.tolist(), strict=True):
        shown[place] = (start, length)
    return shown


def hits(board: Board, query: Selection) -> dict[str, Any]:
    """Return for each step the number of selected rollouts and the number of those that match."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    if not snapshot.rows:
        most = snapshot.state.recorded
        return {"step": [], "rows": [], "hits": [], "at_most": most > 0, "most": most, "stopped": None}
    found = matching(run, snapshot, query)
    everything = selected(run, snapshot, query)
    steps, place = _places(snapshot)
    counts = [np.bincount(place if m is None else place[m], minlength=len(steps)) for m in (everything, found.mask)]
    kept = counts[0] > 0
    total = int(counts[1].sum())
    return {
        "step": steps[kept],
        "rows": counts[0][kept],
        "hits": counts[1][kept],
        "at_most": found.most is not None,
        "most": total if found.most is None else found.most,
        "stopped": found.stopped,
    }


def _places(snapshot: Snapshot) -> tuple[Array, Array]:
    """Return the steps, some of which may have no rollouts, and [rows] the index of each row's step."""
    step = snapshot.raw("step")
    first, last = snapshot.step_range
    if last - first < MAX_STEPS:
        return np.arange(first, last + 1), step - first
    steps = distinct(step)
    return steps, np.searchsorted(steps, step)
