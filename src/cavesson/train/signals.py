"""Ctrl-C and SIGTERM during training: the first asks for a checkpoint and the end, the second ends the run at once."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import FrameType
from typing import Any, Self

from cavesson.errors import print_error
from cavesson.handlers import handling

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 1.0
"""Seconds within which a signal that a launcher or scheduler sends twice is one request."""


class Signals:
    """Context manager that handles Ctrl-C and SIGTERM so that a run can save a checkpoint before it ends.

    It prints nothing if `quiet`, as on all processes except the main one; if `alone`, no launcher forwards signals too.
    """

    def __init__(self, quiet: bool = False, alone: bool = True) -> None:
        self.asked = 0
        """number of the signal that asked for the end; 0 = none did"""
        self._quiet, self._alone = quiet, alone
        self._deferring = False
        self._since = 0.0
        self._before: dict[int, Any] = {}
        self._block = ExitStack()

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._block.enter_context(handling(self._handle, *SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        self._block.close()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only store the first signal inside this block; the run ends at the next safe point."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and not self.asked:
            self.asked, self._since = number, time.monotonic()
            if not self._quiet:
                # Print in a thread, because the signal may have interrupted another print, which must finish first.
                Thread(target=_say, args=(number,), daemon=True).start()
            return
        sent_twice = number == signal.SIGTERM or not self._alone
        if self.asked and sent_twice and time.monotonic() - self._since < TWICE:
            return
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _say(number: int) -> None:
    again = "press Ctrl-C again" if number == signal.SIGINT else "send SIGTERM again"
    print_error(f"interrupted: finishing the step, then saving; {again} to stop at once")
