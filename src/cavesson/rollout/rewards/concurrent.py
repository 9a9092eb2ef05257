"""User code that is `async`, such as rewards: it runs in one event loop that lives as long as the process."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any, TypeVar

from cavesson.rollout.rewards.arguments import Judged, arguments

T = TypeVar("T")
LIMIT = 16
"""Calls of a function that judges one response, at the same time, if no setting says otherwise."""


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call of the function must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def judges_one(function: Callable[..., Any]) -> bool:
    """Return whether an `async` function judges one response per call: it begins with `prompt` and `response`."""
    return is_async(function) and [*inspect.signature(function).parameters][:2] in (
        ["prompt", "response"],
        ["prompt", "completion"],
    )


@dataclass(frozen=True)
class EachResponse:
    """A reward of an `async` function that judges one response per call.

    Attributes:
        function: `(prompt, response, **columns)`, with the values of one row.
        name: of the reward.
        limit: calls at the same time.
    """

    function: Callable[..., Awaitable[Any]]
    name: str
    limit: int = LIMIT

    async def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> list[Any]:
        given = arguments(self.function, self.name, Judged(prompts, responses, columns)).named
        free = asyncio.Semaphore(self.limit)

        async def judge(row: int) -> Any:
            async with free:
                named = {name: values[row] for name, values in given.items()}
                return await self.function(prompts[row], responses[row], **named)

        return await asyncio.gather(*map(judge, range(len(responses))))


def awaited(calls: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, T]:
    """Await calls at the same time, and return what they return; if one fails, the others are cancelled.

    The event loop has its own thread: the caller may run in one already, as in notebooks, and clients that a reward
    keeps between its calls belong to the loop in which they were made.
    """
    if not calls:
        return {}
    together = asyncio.run_coroutine_threadsafe(_together(calls), event_loop())
    try:
        return together.result()
    except BaseException:
        together.cancel()
        raise


async def _together(calls: Mapping[str, Callable[[], Awaitable[T]]]) -> dict[str, T]:
    tasks = {name: asyncio.ensure_future(call()) for name, call in calls.items()}
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all user code that is `async`; it runs in its own thread."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            # They end the loop if any task raises them, besides reaching the code that awaits the task.
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()

    Thread(target=run, name="async-user-code", daemon=True).start()
    return loop
