"""Turns for the heaviest requests, so that however many are sent, the others are still answered."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cavesson.errors import UserError


class BusyError(UserError):
    """Too much was asked for at once; the same request can be sent again later."""


class Turns:
    """Lets a few requests run at once and a few more wait for a moment; the rest are refused at once.

    Args:
        running: How many run at once.
        waiting: How many wait.
        seconds: How long one waits at most.
    """

    def __init__(self, running: int, waiting: int, seconds: float) -> None:
        self._free = asyncio.Semaphore(running)
        self._places = waiting
        self._seconds = seconds
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, and holds it.

        Raises:
            BusyError: Too many wait already, or none of those that run has ended in time.
        """
        await self._acquire()
        try:
            yield
        finally:
            self._free.release()

    async def _acquire(self) -> None:
        busy = BusyError("the board is busy with other queries: send this one again in a few seconds")
        if self._free.locked() and self._waiting >= self._places:
            raise busy
        self._waiting += 1
        try:
            async with asyncio.timeout(self._seconds):
                await self._free.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting -= 1
