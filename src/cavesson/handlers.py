"""Signals: temporary handlers, after which the previous ones are restored, and the end of the parent process."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType

# The parent may block or ignore Ctrl-C, and may end before this program has begun.
_PROGRAM = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 9); signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "signal.pthread_sigmask(signal.SIG_SETMASK, ()); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


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


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command that does the same, but that the kernel kills when the thread that starts it ends.

    Except on Linux, it is the same command.
    """
    return [sys.executable, "-c", _PROGRAM, str(os.getpid()), *command] if sys.platform == "linux" else [*command]
