"""Ctrl-C and SIGTERM while a run trains: the first asks for a checkpoint, the second ends at once."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from types import FrameType, TracebackType
from typing import Any, Self

from cavesson.handlers import handling

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TWICE = 1.0
"""Seconds within which a signal that a launcher or scheduler sends twice is one request."""


class Signals:
    """Takes note of Ctrl-C and SIGTERM inside its block, instead of breaking off; a context manager.

    Args:
        quiet: say nothing, as on all processes but the main one.
        alone: whether no launcher passes signals on as well.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """In this block the first signal is only noted, because there will be a better moment to end."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._deferring and not self.asked:
            self.asked, self._since = number, time.monotonic()
            if not self._quiet:
                # Whatever is being printed just now must be able to end before this is.
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
    print(f"interrupted: finishing the step, then saving; {again} to stop at once", file=sys.stderr, flush=True)
