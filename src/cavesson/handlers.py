"""Signals: temporary handlers, after which the previous ones are restored, and the end of the parent process."""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

_PR_SET_PDEATHSIG = 1


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals with a function inside the block; has no effect outside the main thread.

    Args:
        handler: called with the signal's number and the current frame.
        numbers: the signals.
    """
    if current_thread() is not main_thread():  # Python delivers signals only to the main thread
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends; has no effect except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
