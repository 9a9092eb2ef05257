"""Signals: temporary handlers, which are restored and which forked processes do not get, and the end of the parent."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, local, main_thread
from types import FrameType
from typing import Any

# The parent may block or ignore Ctrl-C, and may end before this program has begun.
_PROGRAM = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 9); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
_FIRST: dict[int, Any] = {}
"""What handles each signal that is handled now, without any of our handlers."""
_MASK = local()
"""The signals that a thread blocks, while it forks."""


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals with a function inside the block; has no effect outside the main thread."""
    if current_thread() is not main_thread():  # Python delivers signals only to the main thread
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    outer = [number for number in numbers if number not in _FIRST]
    _FIRST.update((number, before[number]) for number in outer)
    try:
        for number in numbers:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
        for number in outer:
            _FIRST.pop(number, None)  # a forked process has none


def _hold() -> None:
    """Hold back the signals that have our handlers while a thread forks.

    Python drops those that reach a forked process before `_begin_child`, and whoever ends the process would wait.
    """
    _MASK.before = signal.pthread_sigmask(signal.SIG_BLOCK, _FIRST)


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK.before)


def _begin_child() -> None:
    """Let a forked process handle signals as its parent does without our handlers."""
    for number, first in _FIRST.items():
        signal.signal(number, first)
    _FIRST.clear()
    _let_through()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(before=_hold, after_in_parent=_let_through, after_in_child=_begin_child)


@contextmanager
def arrivals(number: int) -> Iterator[list[int]]:
    """Note in a list every arrival of a signal inside the block, which is handled as before."""
    before, seen = signal.getsignal(number), list[int]()
    if not callable(before):
        yield seen
        return
    then = before

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        then(number, frame)

    with handling(note, number):
        yield seen


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that does the same, but that the kernel kills when the thread that starts it ends.

    Except on Linux, it is the same command.
    """
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), *command] if sys.platform == "linux" else [*command]
