"""A queue for the most expensive requests, so that other requests are answered however many of these are sent."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cavesson.errors import UserError


class BusyError(UserError):
    """Too many requests are running; the same request can be sent again later."""


class Turns:
    """Runs a few requests at once, and lets a few more wait for some seconds at most; rejects all others."""

    def __init__(self, running: int, waiting: int, seconds: float) -> None:
        self._free = asyncio.Semaphore(running)
        self._places = waiting
        self._seconds = seconds
        self._waiting = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and hold it.

        Raises:
            BusyError: Too many requests are already waiting, or no running request ended in time.
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
