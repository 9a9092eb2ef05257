"""Parts of files read by several processes, because Python computes on one core only."""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from threading import Condition
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
    with ExitStack() as stack:
        batches: list[Batch | _Process] = [batch]
        others = min(processes, MOST, os.cpu_count() or 1) - 1
        batches += [stack.enter_context(_process(batch)) for _ in range(others)]
        pool = stack.enter_context(ThreadPoolExecutor(len(batches), "import"))
        try:
            running = [pool.submit(_work, batch, turns, account) for batch in batches]
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            turns.end()
        return [segment for each in running for segment in each.result()]


def _work(batch: "Batch | _Process", turns: "_Turns", account: Account) -> list[Segment]:
    segments = []
    while (given := turns.next()) is not None:
        number, portion = given
        found = batch.read(portion)
        with turns.turn(number) as going_on:
            first = account(portion, found) if going_on else {}
        if first:
            segments.append(batch.write(first))
    return segments


class _Turns:
    """Gives out the portions, and lets who has read one wait until all before it are accounted for."""

    def __init__(self, portions: Iterator[Portion]) -> None:
        self._portions = enumerate(portions)
        self._changed = Condition()
        self._turn = 0
        self._ended = False

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

    def end(self) -> None:
        with self._changed:
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

    def read(self, portion: Portion) -> Found:
        found: Found = self._ask("read", portion)
        return found

    def write(self, first: Mapping[int, int]) -> Segment:
        segment: Segment = self._ask("write", dict(first))
        return segment

    def _ask(self, method: str, argument: Any) -> Any:
        try:
            self._questions.write(pickle.dumps((method, argument)))
            self._questions.flush()
            answer = pickle.load(self._answers)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            raise UserError(f"a process of the import ended early (exit code {code}): memory may be short") from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def answer_all() -> None:
    """Answers what is asked over standard input, until nobody is there to ask: all that such a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    questions, answers = os.fdopen(0, "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what else is printed must not come between them
    batch: Batch = pickle.load(questions)
    while questions.peek(1):
        method, argument = pickle.load(questions)
        answer: Found | Segment | Exception
        try:
            answer = batch.read(argument) if method == "read" else batch.write(argument)
        except Exception as error:
            answer = error
        answers.write(pickle.dumps(answer))
        answers.flush()
