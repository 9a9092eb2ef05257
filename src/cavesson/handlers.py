"""Handlers of signals that are there for a while only: whoever called us has its own again afterwards."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle signals by a function inside the block. In other threads than the main one nothing changes.

    Args:
        handler: called with the signal's number and the current frame.
        numbers: the signals.
    """
    if current_thread() is not main_thread():  # Python tells no other thread of signals
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
