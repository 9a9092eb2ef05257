"""Read parts of files in several processes, because Python code runs on one core per process."""

import gc
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
from cavesson.importers.batch import PartsRead, RolloutBuffer
from cavesson.importers.reading import File
from cavesson.process_limits import without_pandas
from cavesson.processors import usable_processors
from cavesson.record.segments import Segment

MAX_PROCESSES = 4
"""Processes at once; each holds one portion."""
Portion = Sequence[File]
"""Parts of files that one process reads at once."""
Account = Callable[[Portion, PartsRead], Mapping[int, int]]
"""Is told of the portions in their order, and says how the rollouts of each are numbered."""


def read_parts(portions: Iterator[Portion], processes: int, batch: RolloutBuffer, account: Account) -> list[Segment]:
    """Read all portions and return the written segments, which are not yet committed.

    ``processes`` is the number worth starting, which ``MAX_PROCESSES`` and the cores limit; each has a separate copy of
    ``batch``. ``account`` is called with each portion, in order.
    """
    turns = _Turns(portions)
    segments: list[Segment] = []
    with ExitStack() as stack:
        count = min(processes, MAX_PROCESSES, usable_processors()) if _can_fork() else 1
        batches = [stack.enter_context(_process(batch)) for _ in range(count)] if count > 1 else [batch]
        threads = [Thread(target=_work, args=(batch, turns, account, segments), daemon=True) for batch in batches]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            turns.end()
            # No thread may still write when Ctrl-C propagates; a thread that has not started yet finds no work.
            for thread in filter(Thread.is_alive, threads):
                thread.join()
    if turns.error is not None:
        raise turns.error
    return segments


def _can_fork() -> bool:
    """Whether forking is safe: no other thread may hold a lock that the children would wait for."""
    return sys.platform == "linux" and active_count() == 1 and not current_process().daemon  # daemons cannot fork


def _work(batch: "RolloutBuffer | _Process", turns: "_Turns", account: Account, segments: list[Segment]) -> None:
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
    """Distributes the portions, and makes each reader wait until all earlier portions are accounted for."""

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
        """Wait for the turn of a portion; yield False if the work has already ended because something failed."""
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
def _process(batch: RolloutBuffer) -> Iterator["_Process"]:
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
    """A batch in a separate process."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe

    def read(self, portion: Portion) -> PartsRead:
        found: PartsRead = self._ask("read", portion)
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
            raise UserError(
                f"a process of the import ended early (exit code {code}): the machine may be out of memory"
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _answer_all(pipe: Connection, other_end: Connection, batch: RolloutBuffer) -> None:
    """Answer requests until the pipe is closed; the main loop of a child process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's cleanup must not run in its children
    other_end.close()  # inherited by the fork; while it is open, the pipe never reports EOF
    prepare()
    answer: PartsRead | Segment | Exception
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
    """Speed up a process that only reads and writes portions; together, these steps save a fifth of the time."""
    without_pandas()
    # Make glibc keep freed memory instead of requesting it again page by page for the next portion: it keeps blocks up
    # to the size of the largest one that was returned to the system.
    np.empty((32 << 20) - 4096, np.uint8)
    # Parsed data has no reference cycles; collecting new objects after each portion is enough.
    gc.disable()
    gc.freeze()
