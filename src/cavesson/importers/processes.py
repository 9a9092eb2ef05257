"""Parts of files read by several processes, because Python computes on one core only."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe, current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Condition, Thread, active_count
from typing import Any

import numpy as np

from cavesson.errors import UserError
from cavesson.importers.batch import Batch, Found
from cavesson.importers.reading import File
from cavesson.record.arrow import without_pandas
from cavesson.record.segments import Segment

MOST = 4
"""Processes at once; each holds one portion."""
Portion = Sequence[File]
"""Parts of files that one process reads at once."""
Account = Callable[[Portion, Found], Mapping[int, int]]
"""Is told of the portions in their order, and says how the rollouts of each are numbered."""


def read_parts(portions: Iterator[Portion], processes: int, batch: Batch, account: Account) -> list[Segment]:
    """Reads everything and returns the segments that were written.

    Args:
        portions: What is to be read.
        processes: How many are worth starting; there are never more than ``MOST``, or than the machine has cores.
        batch: Reads and writes; each process has a copy of it.
        account: Is told of each portion.
    """
    turns = _Turns(portions)
    segments: list[Segment] = []
    with ExitStack() as stack:
        count = min(processes, MOST, os.cpu_count() or 1) if _can_fork() else 1
        batches = [stack.enter_context(_process(batch)) for _ in range(count)] if count > 1 else [batch]
        threads = [Thread(target=_work, args=(batch, turns, account, segments), daemon=True) for batch in batches]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            turns.end()
            # Nothing may be written any more when Ctrl-C is passed on; one that has not begun yet finds nothing to do.
            for thread in filter(Thread.is_alive, threads):
                thread.join()
    if turns.error is not None:
        raise turns.error
    return segments


def _can_fork() -> bool:
    """Whether copies of this process can go on: no other thread has something half done, which they would wait for."""
    return sys.platform == "linux" and active_count() == 1 and not current_process().daemon  # those have no children


def _work(batch: "Batch | _Process", turns: "_Turns", account: Account, segments: list[Segment]) -> None:
    try:
        while (given := turns.next()) is not None:
            number, portion = given
            found = batch.read(portion)
            with turns.turn(number) as going_on:
                first = account(portion, found) if going_on else {}
            if first:
                segments.append(batch.write(first))
    except BaseException as error:
        turns.end(error)


class _Turns:
    """Gives out the portions, and lets who has read one wait until all before it are accounted for."""

    def __init__(self, portions: Iterator[Portion]) -> None:
        self._portions = enumerate(portions)
        self._changed = Condition()
        self._turn = 0
        self._ended = False
        self.error: BaseException | None = None
        """What went wrong first."""

    def next(self) -> tuple[int, Portion] | None:
        with self._changed:
            return None if self._ended else next(self._portions, None)

    @contextmanager
    def turn(self, number: int) -> Iterator[bool]:
        """Waits for the turn of a portion; yields False if the work has ended before, because something failed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._turn == number)
            yield not self._ended
            self._turn += 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self.error = self.error or error
            self._ended = True
            self._changed.notify_all()


@contextmanager
def _process(batch: Batch) -> Iterator["_Process"]:
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=_answer_all, args=(theirs, ours, batch))
    process.start()
    theirs.close()
    try:
        yield _Process(process, ours)
    finally:
        process.kill()
        process.join()
        ours.close()


class _Process:
    """A batch in a process of its own."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    def read(self, portion: Portion) -> Found:
        found: Found = self._ask("read", portion)
        return found

    def write(self, first: Mapping[int, int]) -> Segment:
        segment: Segment = self._ask("write", dict(first))
        return segment

    def _ask(self, method: str, argument: Any) -> Any:
        try:
            self._pipe.send((method, argument))
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise UserError(f"a process of the import ended early (exit code {code}): memory may be short") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _answer_all(pipe: Connection, other_end: Connection, batch: Batch) -> None:
    """Answers what is asked, until nobody is there to ask: all that such a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what the copied process does at its end is not for copies
    other_end.close()  # it came with the copy; while it is open, nobody seems to have gone
    prepare()
    answer: Found | Segment | Exception
    with suppress(EOFError):
        while True:
            method, argument = pipe.recv()
            try:
                answer = batch.read(argument) if method == "read" else batch.write(argument)
            except Exception as error:
                answer = error
            pipe.send(answer)
            gc.collect()


def prepare() -> None:
    """Makes a process quick that does nothing but read and write portions; together this is a fifth of the time."""
    without_pandas()
    # glibc keeps what is freed, instead of getting it anew page by page for the next portion: blocks up to the size of
    # the largest that it has given back to the system.
    np.empty((32 << 20) - 4096, np.uint8)
    # What is parsed has no cycles to look for; after each portion is soon enough, and only in what came meanwhile.
    gc.disable()
    gc.freeze()
