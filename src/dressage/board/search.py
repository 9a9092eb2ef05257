"""Search: what the index knows at once, and what the texts must be read for in the background."""

import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dressage.board.expressions import compiled, required
from dressage.board.runs import Board, OpenRun
from dressage.board.scanner import Rows
from dressage.board.scanner import hits as hits_in
from dressage.board.selection import Selection, both, selected
from dressage.errors import UserError
from dressage.index.columns import Array
from dressage.index.search import Candidates, candidates
from dressage.index.sets import distinct
from dressage.index.snapshot import Snapshot
from dressage.index.text import next_size

PATIENCE = 0.1
"""Seconds that a request waits for the background."""
FORGOTTEN = 5.0
"""Seconds without a request after which a search in the background stops."""
FIRST_CHUNK = 64
MOST_STEPS = 10_000_000
"""From the first to the last step, to be counted without sorting them."""


class Matching(NamedTuple):
    """What a request means, as far as it is known."""

    mask: Array | None
    """[rows] the rows that are known to match; None means all."""
    most: int | None
    """How many rows can match at most, while not all were looked at."""
    stopped: str | None = None
    """Why the rest is not looked at."""


def matching(run: OpenRun, snapshot: Snapshot, query: Selection) -> Matching:
    """Returns the rows that match steps, filter, stars and search text."""
    mask = selected(run, snapshot, query)
    text = query.q if query.regex else query.q.strip()
    if not text:
        return Matching(mask, None)
    key = (text, query.regex)
    search = run.memory.latest("search", key, lambda old: _search(old, run, snapshot, *key))
    found, left = search.ask()
    known, open_ = both(mask, found), int(np.count_nonzero(both(mask, left)))
    return Matching(known, open_ + int(np.count_nonzero(known)) if open_ else None, search.stopped if open_ else None)


def _search(old: "Search | None", run: OpenRun, snapshot: Snapshot, text: str, regex: bool) -> "Search":
    """Returns a search of this moment: the old one if nothing has come since, else one that knows what that found."""
    if old is not None and old.snapshot.state == snapshot.state:
        return old
    new = Search(run, snapshot, text, regex)
    if old is not None:
        new.take_over(old)
    return new


class Search:
    """One search text in one moment of a run. What the index cannot tell is looked up in a thread of its own."""

    def __init__(self, run: OpenRun, snapshot: Snapshot, text: str, regex: bool) -> None:
        self.run = run
        self.snapshot = snapshot
        self.pattern = compiled(text, regex)
        self.stopped: str | None = None
        self._asked = time.monotonic()
        self._thread: threading.Thread | None = None
        self._progress = threading.Condition()
        possible, exact = _possible(snapshot, text, regex)
        nothing = np.zeros(snapshot.rows, np.bool_)
        self.found: Array = possible if exact else nothing
        self.left: Array = nothing if exact else possible

    def ask(self) -> tuple[Array, Array]:
        """Says that somebody wants to know, and waits a moment for what is not known yet.

        Returns:
            [rows] which rows match, and which may, as nobody has looked yet.
        """
        self._asked = time.monotonic()
        with self._progress:
            if self.left.any() and self.stopped is None:
                if self._thread is None or not self._thread.is_alive():
                    self._thread = threading.Thread(target=self._verify, daemon=True, name="search")
                    self._thread.start()
                self._progress.wait_for(self._done, PATIENCE)
            return self.found.copy(), self.left.copy()

    def take_over(self, old: "Search") -> None:
        """Takes what an earlier search for the same found out: no response ever changes."""
        known = old.snapshot.state.text_rows
        with old._progress:
            looked_at = ~old.left[:known]
            self.found[:known] |= old.found[:known] & looked_at
            self.left[:known] &= ~looked_at
            old._asked = -FORGOTTEN

    def _done(self) -> bool:
        return self.stopped is not None or not self.left.any()

    def _verify(self) -> None:
        """Reads the texts that are left, chunk by chunk in the order of the record, while somebody asks."""
        rows = self._in_order(np.flatnonzero(self.left))
        size = FIRST_CHUNK
        try:
            while len(rows) and time.monotonic() - self._asked < FORGOTTEN:
                chunk, rows = rows[:size], rows[size:]
                what = Rows(self.run.record.folder, self.run.folder, chunk, keys_of(self.snapshot, chunk))
                found = self.run.scanner.scan(what, self.pattern)
                size = next_size(len(chunk), found.size)
                with self._progress:
                    self.found[chunk[found.places]] = True
                    self.left[chunk] = False
                    self._progress.notify_all()
        except TimeoutError:
            self._stop("the expression takes too long on some responses; a simpler one may not")
        except UserError as error:
            self._stop(str(error))

    def _stop(self, reason: str) -> None:
        with self._progress:
            self.stopped = reason
            self._progress.notify_all()

    def _in_order(self, rows: Array) -> Array:
        step, sample = self.snapshot.raw("step")[rows], self.snapshot.raw("sample")[rows]
        return rows[np.lexsort((sample, step))]


def _possible(snapshot: Snapshot, text: str, regex: bool) -> Candidates:
    """Returns the rows that may match."""
    mask = np.zeros(snapshot.rows, np.bool_)
    mask[: snapshot.state.text_rows] = True
    if snapshot.alive is not None:
        mask &= snapshot.alive
    exact = not regex
    for piece in required(text) if regex else [text]:
        found = candidates(snapshot, piece)
        mask &= found.mask
        exact = exact and found.exact
    return Candidates(mask, exact)


def keys_of(snapshot: Snapshot, rows: Array) -> list[tuple[int, int]]:
    """Returns step and sample of each row."""
    return list(zip(snapshot.raw("step")[rows].tolist(), snapshot.raw("sample")[rows].tolist(), strict=True))


def spans_of(run: OpenRun, texts: list[str], query: Selection) -> list[tuple[int, int] | None]:
    """Returns start and length in bytes of the first hit in each of some responses."""
    spans: list[tuple[int, int] | None] = [None] * len(texts)
    try:
        # Plain text is found in no time; an expression may need more than there is.
        if query.regex:
            found = run.scanner.scan(texts, compiled(query.q, regex=True))
        else:
            found = hits_in(pa.chunked_array([pa.array(texts, pa.string())]), compiled(query.q.strip(), regex=False))
    except TimeoutError:
        return spans
    for place, start, length in zip(found.places.tolist(), found.start.tolist(), found.length.tolist(), strict=True):
        spans[place] = (start, length)
    return spans


def hits(board: Board, query: Selection) -> dict[str, Any]:
    """Returns for each step how many rollouts were looked at and how many match."""
    run = board.run(query.run)
    snapshot = run.snapshot()
    if not snapshot.rows:
        return {"step": [], "rows": [], "hits": [], "at_most": False, "most": 0, "stopped": None}
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
    """Returns the steps, some of which may be of no rollout, and [rows] which of them each row is of."""
    step = snapshot.raw("step")
    first, last = snapshot.step_range
    if last - first < MOST_STEPS:
        return np.arange(first, last + 1), step - first
    steps = distinct(step)
    return steps, np.searchsorted(steps, step)
