"""Parts of files read by several processes, because Python computes on one core only."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from threading import Condition, Thread
from typing import Any

from dressage.errors import UserError
from dressage.importers.batch import Batch, Found
from dressage.importers.reading import File
from dressage.record.segments import Segment

MOST = 4
"""Processes at once, this one among them; each holds one portion."""
Portion = Sequence[File]
"""Parts of files that one process reads at once."""
Account = Callable[[Portion, Found], Mapping[int, int]]
"""Is told of the portions in their order, and says how the rollouts of each are numbered."""


def read_parts(portions: Iterator[Portion], processes: int, batch: Batch, account: Account) -> list[Segment]:
    """Reads everything and returns the segments that were written.

    Args:
        portions: What is to be read.
        processes: How many are worth starting; there are never more than ``MOST``, or than the machine has cores.
        batch: Reads and writes in this process; the others get copies of it.
        account: Is told of each portion.
    """
    turns = _Turns(portions)
    segments: list[Segment] = []
    with ExitStack() as stack:
        batches: list[Batch | _Process] = [batch]
        others = min(processes, MOST, os.cpu_count() or 1) - 1
        batches += [stack.enter_context(_process(batch)) for _ in range(others)]
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


def _work(batch: "Batch | _Process", turns: "_Turns", account: Account, segments: list[Segment]) -> None:
    try:
        if isinstance(batch, _Process):
            batch.wait_until_ready()  # before it takes a portion, which the others would have to wait for
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
    # -P: no module of the working folder takes the place of an installed one.
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer_all; answer_all()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield _Process(process, batch)
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()  # closes its pipes; if it ended by itself, a question was on the way


class _Process:
    """A batch in a process of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]", batch: Batch) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process, self._questions, self._answers = process, process.stdin, process.stdout
        self._questions.write(pickle.dumps(batch))

    def wait_until_ready(self) -> None:
        """Returns when the process has started, which takes about half a second."""
        self._answer()

    def read(self, portion: Portion) -> Found:
        found: Found = self._ask("read", portion)
        return found

    def write(self, first: Mapping[int, int]) -> Segment:
        segment: Segment = self._ask("write", dict(first))
        return segment

    def _ask(self, method: str, argument: Any) -> Any:
        with self._alive():
            self._questions.write(pickle.dumps((method, argument)))
            self._questions.flush()
        return self._answer()

    def _answer(self) -> Any:
        with self._alive():
            answer = pickle.load(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            raise UserError(f"a process of the import ended early (exit code {code}): memory may be short") from error


def answer_all() -> None:
    """Answers what is asked over standard input, until nobody is there to ask: all that such a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    questions, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed must not come between them
    answer: Found | Segment | Exception | None = None  # the first one says that it is ready
    batch: Batch | None = None
    while True:
        answers.write(pickle.dumps(answer))
        answers.flush()
        if not questions.peek(1):
            return
        batch = batch or pickle.load(questions)
        method, argument = pickle.load(questions)
        try:
            answer = batch.read(argument) if method == "read" else batch.write(argument)
        except Exception as error:
            answer = error
