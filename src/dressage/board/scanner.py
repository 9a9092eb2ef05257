"""A process that looks for an expression in texts, so that one that takes too long can be stopped: it is killed."""

import signal
import threading
from contextlib import suppress
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import dressage.record
from dressage.board.expressions import HIT
from dressage.errors import UserError
from dressage.index.columns import Array
from dressage.index.folder import TEXT_ROWS
from dressage.index.process import small_process
from dressage.index.sets import distinct
from dressage.index.snapshot import snapshot
from dressage.index.texts import LENGTH, read_texts

START = 60.0
"""Seconds that starting the process may take."""
DENSE = 8
"""So many rows of a block of texts are read faster from the record, together with those of the blocks around it."""
MOST_SECONDS = 10.0
"""For one chunk of texts, which is a matter of milliseconds for any sensible expression."""


class Found(NamedTuple):
    """The hits in a chunk of texts."""

    places: Array
    """Which texts have one."""
    start: Array
    """Where the first in each starts, in bytes of UTF-8."""
    length: Array
    """How long it is, in bytes."""
    size: int
    """Bytes of all texts."""


class Rows(NamedTuple):
    """Responses of a run."""

    run: str
    """Where it is."""
    folder: Path
    """Where its index is."""
    rows: Array
    """Their numbers in the index."""
    keys: list[tuple[int, int]]
    """Step and sample of each."""


class Scanner:
    """Starts the process when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def scan(self, what: "Rows | list[str]", pattern: str) -> Found:
        """Returns which responses match.

        Args:
            what: The responses, or where they are.
            pattern: What ``expressions.compiled`` made.

        Raises:
            TimeoutError: It took too long and was stopped.
            UserError: The record has no such rollout.
        """
        with self._lock:
            pipe = self._started()
            try:
                pipe.send((what, pattern))
                if not pipe.poll(MOST_SECONDS):
                    raise TimeoutError
                answer = pipe.recv()
            except (TimeoutError, EOFError, OSError):
                self.stop()
                raise TimeoutError from None
        if isinstance(answer, Exception):
            raise answer
        found: Found = answer
        return found

    def start(self) -> None:
        """Starts the process, so that the first search need not wait for it."""
        with self._lock:
            self._started()

    def stop(self) -> None:
        """Kills the process."""
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
            self._process.start()
            other.close()
            try:
                if not self._pipe.poll(START):
                    raise EOFError
                self._pipe.recv()
            except EOFError:
                self.stop()
                raise UserError("the process that searches did not start") from None
        return self._pipe


def _work(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the board
    with small_process(), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send("ready")
        while True:
            what, pattern = pipe.recv()
            try:
                texts = _read(what) if isinstance(what, Rows) else pa.chunked_array([pa.array(what, pa.string())])
                pipe.send(hits(texts, pattern))
            except UserError as error:
                pipe.send(error)
            except (pa.ArrowException, OSError, ValueError) as error:
                pipe.send(UserError(f"the record cannot be read: {str(error).splitlines()[0]}"))


def _read(what: Rows) -> pa.ChunkedArray:
    """Returns the responses: few of many from the index, many that stand together from the record."""
    run = _opened(what.run)
    stored = snapshot(what.folder)
    dense = len(what.rows) > DENSE * len(distinct(what.rows // TEXT_ROWS))
    if dense or what.rows.max() >= stored.state.texts:
        return run.fetch(what.keys, ["response"])["response"]
    texts = read_texts(run, stored, what.rows).response
    if cut := [place for place, text in enumerate(texts) if len(text) == LENGTH]:
        whole = run.fetch([what.keys[place] for place in cut], ["response"])["response"].to_pylist()
        for place, text in zip(cut, whole, strict=True):
            texts[place] = text
    return pa.chunked_array([pa.array(texts, pa.string())])


@lru_cache(maxsize=8)
def _opened(path: str) -> dressage.record.Run:
    return dressage.record.open(path)


def hits(texts: pa.ChunkedArray, pattern: str) -> Found:
    """Returns which texts match and where."""
    spans = pc.struct_field(pc.extract_regex_span(texts, pattern), HIT).combine_chunks()
    places = np.flatnonzero(pc.is_valid(spans).to_numpy(zero_copy_only=False))
    found = np.asarray(spans.drop_null().flatten()).reshape(-1, 2)
    return Found(places, found[:, 0], found[:, 1], texts.nbytes)
