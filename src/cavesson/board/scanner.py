"""A separate process that searches texts for an expression, so that a search that takes too long can be killed."""

import signal
import threading
import time
from contextlib import suppress
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cavesson.record
from cavesson.board.expressions import HIT
from cavesson.errors import UserError, first_line
from cavesson.index.columns import Array
from cavesson.index.snapshot import snapshot
from cavesson.index.texts import read_responses
from cavesson.index.turns import are_in, read_turns
from cavesson.process_limits import small_process, without_ctrl_c

START = 60.0
"""Seconds that starting the process may take."""
PORTION = 0.03
"""Seconds after which it tells what it has found so far."""
FIRST_CHUNK = 32
CHUNK_SECONDS = 0.01
"""For so long it looks at texts without a look at the clock, about."""
MAX_SECONDS = 10.0
"""For one chunk of texts, which is a matter of milliseconds for any sensible expression."""


class Hits(NamedTuple):
    """The hits in some texts."""

    places: Array
    """Which texts have one."""
    start: Array
    """Where the first in each starts, in bytes of UTF-8."""
    length: Array
    """How long it is, in bytes."""


class ScannedRows(NamedTuple):
    """Responses of a run to search."""

    run: str
    """Where it is."""
    folder: Path
    """Where its index is."""
    rows: Array
    """Their numbers in the index, in the order in which to look at them."""


class Looked(NamedTuple):
    """The hits in the first part of some rows."""

    stop: int
    """So many of them were looked at."""
    places: Array
    """Which of these match."""


class Scanner:
    """Starts the process when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def scan(self, what: ScannedRows, pattern: str) -> Looked:
        """Search the first responses, as many as can be searched within a fraction of a second.

        The pattern is an expression from ``expressions.compiled``.

        Raises:
            TimeoutError: The search took too long and was stopped.
            UserError: The record does not contain one of the rollouts.
        """
        looked: Looked = self._ask(what, pattern)
        return looked

    def spans(self, texts: list[str], pattern: str) -> Hits:
        """Return which texts match, and where; raise a TimeoutError if the search took too long and was stopped."""
        found: Hits = self._ask(texts, pattern)
        return found

    def _ask(self, what: ScannedRows | list[str], pattern: str) -> Any:
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((what, pattern))
                if not pipe.poll(MAX_SECONDS):
                    raise TimeoutError
                answer = pipe.recv()
            except (TimeoutError, EOFError, OSError):
                self.stop()
                raise TimeoutError from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self) -> None:
        """Start the process, so that the first search need not wait for it."""
        with self._lock:
            self._started()

    def stop(self) -> None:
        """Kill the process."""
        with self._lock:
            if self._process is not None and self._pipe is not None:
                self._process.kill()
                self._process.join()
                self._pipe.close()
            self._process = self._pipe = None

    def _started(self) -> Connection:
        if self._pipe is None or self._process is None or not self._process.is_alive():
            context = get_context("spawn")
            self._pipe, other = context.Pipe()
            self._process = context.Process(target=_work, args=(other,), daemon=True, name="scanner")
            with without_ctrl_c():
                self._process.start()
            other.close()
            try:
                if not self._pipe.poll(START):
                    raise EOFError
                self._pipe.recv()
            except EOFError:
                self.stop()
                raise UserError("the search process did not start") from None
        return self._pipe


def _work(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process ends with the board
    small_process()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send("ready")
        while True:
            what, pattern = pipe.recv()
            try:
                pipe.send(_look(what, pattern) if isinstance(what, ScannedRows) else spans(what, pattern))
            except UserError as error:
                pipe.send(error)
            except (pa.ArrowException, OSError, ValueError) as error:
                pipe.send(UserError(f"the record cannot be read: {first_line(error)}"))


def _look(what: ScannedRows, pattern: str) -> Looked:
    """Search one chunk after another until the time is up, with chunks sized so that the clock is checked often."""
    run, stored = _opened(what.run), snapshot(what.folder)
    begun = last = time.monotonic()
    size, count, found = FIRST_CHUNK, 0, [np.empty(0, np.int64)]
    while count < len(what.rows) and last < begun + PORTION:
        rows = what.rows[count : count + size]
        hit = np.asarray(pc.match_substring_regex(read_responses(run, stored, rows), pattern))
        hit = hit | are_in(read_turns(run, stored, rows), len(rows), pattern)
        found.append(count + np.flatnonzero(hit))
        count += len(rows)
        now = time.monotonic()
        size = 2 * size if now - last < CHUNK_SECONDS / 2 else max(size // 2, 1) if now - last > CHUNK_SECONDS else size
        last = now
    return Looked(count, np.concatenate(found))


@lru_cache(maxsize=8)
def _opened(path: str) -> cavesson.record.Run:
    return cavesson.record.open(path)


def spans(texts: list[str], pattern: str) -> Hits:
    """Return which texts match, and where."""
    found = pc.struct_field(pc.extract_regex_span(pa.array(texts, pa.string()), pattern), HIT)
    places = np.flatnonzero(pc.is_valid(found).to_numpy(zero_copy_only=False))
    ends = np.asarray(found.drop_null().flatten()).reshape(-1, 2)
    return Hits(places, ends[:, 0], ends[:, 1])
