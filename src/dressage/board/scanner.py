"""A process that looks for an expression in texts, so that one that takes too long can be stopped: it is killed."""

import signal
import threading
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import dressage.record
from dressage.board.expressions import HIT
from dressage.errors import UserError
from dressage.index.columns import Array
from dressage.index.imports import without_pandas

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


class Scanner:
    """Starts the process when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None

    def scan(self, run: str, keys: list[tuple[int, int]], pattern: str) -> Found:
        """Returns which responses match.

        Args:
            run: Where the run is.
            keys: Step and sample of each response.
            pattern: What ``expressions.compiled`` made.

        Raises:
            TimeoutError: It took too long and was stopped.
            UserError: The record has no such rollout.
        """
        with self._lock:
            pipe = self._started()
            pipe.send((run, keys, pattern))
            try:
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
            if not self._pipe.poll(60):
                raise UserError("the process that searches did not start")
            self._pipe.recv()
        return self._pipe


def _work(pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the board
    runs: dict[str, dressage.record.Run] = {}
    with without_pandas(), suppress(EOFError, BrokenPipeError, ConnectionResetError):
        pipe.send("ready")
        while True:
            run, keys, pattern = pipe.recv()
            try:
                if run not in runs:
                    runs[run] = dressage.record.open(run)
                pipe.send(hits(runs[run].fetch(keys, ["response"])["response"], pattern))
            except UserError as error:
                pipe.send(error)


def hits(texts: pa.ChunkedArray, pattern: str) -> Found:
    """Returns which texts match and where."""
    spans = pc.struct_field(pc.extract_regex_span(texts, pattern), HIT).combine_chunks()
    places = np.flatnonzero(pc.is_valid(spans).to_numpy(zero_copy_only=False))
    found = np.asarray(spans.drop_null().flatten()).reshape(-1, 2)
    return Found(places, found[:, 0], found[:, 1], texts.nbytes)
