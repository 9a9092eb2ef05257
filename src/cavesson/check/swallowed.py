"""Exceptions that a reward raises and catches itself, so that a score hides them."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from cavesson.errors import in_a_line, is_of_user
from cavesson.rollout.rewards.concurrent import event_loop

Tracer = Callable[[FrameType, str, Any], Any]
_ORDINARY = (StopIteration, StopAsyncIteration, GeneratorExit)
"""They end loops."""


class Raised(NamedTuple):
    """An exception that passed through the user's code."""

    error: str
    """its class and message"""
    place: str
    """the file and line where it first was in the user's code"""
    kind: type[BaseException]
    is_direct: bool
    """whether that line raised it itself, and nothing that it called"""

    @property
    def is_mistake(self) -> bool:
        """Whether no answer can cause it."""
        return self.is_direct and issubclass(self.kind, NameError)

    @property
    def may_be_unreadable(self) -> bool:
        """Whether it is what an answer in another format causes."""
        return issubclass(self.kind, ValueError | LookupError | ArithmeticError) or "NoneType" in self.error


@contextmanager
def exceptions_of_user() -> Iterator[list[Raised]]:
    """Collect the exceptions in the user's files during the block: in this thread, in new ones and in the event loop.

    If the code that runs in the block returns normally, it has caught all of them.
    """
    found: dict[int, tuple[BaseException, Raised]] = {}
    raised: list[Raised] = []

    def enter(frame: FrameType, event: str, _: Any) -> Tracer | None:
        file = frame.f_code.co_filename
        if event != "call" or file.startswith("<") or not is_of_user(file):  # <string> is code that it evaluates
            return None
        frame.f_trace_lines = False
        return note

    def note(frame: FrameType, event: str, what: Any) -> Tracer:
        if event == "exception" and not isinstance(what[1], _ORDINARY) and id(what[1]) not in found:
            kind, error, traceback = what
            place = f"{frame.f_code.co_filename}, line {frame.f_lineno}"
            one = Raised(in_a_line(error), place, kind, traceback.tb_next is None)
            found[id(what[1])] = (what[1], one)  # kept, so that no other exception gets its identity
        return note

    before, before_threads = sys.gettrace(), threading.gettrace()
    event_loop().call_soon_threadsafe(sys.settrace, enter)
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        yield raised
    finally:
        sys.settrace(before)
        threading.settrace(before_threads)
        event_loop().call_soon_threadsafe(sys.settrace, None)
        raised += [one for _, one in found.values()]
