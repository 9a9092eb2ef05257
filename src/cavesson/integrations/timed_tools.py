"""Measure how long the tools of a trainer take."""

import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any


@dataclass
class Call:
    """One call of a tool."""

    seconds: float | None = None
    """None until it has ended"""


Times = dict[tuple[int, str | None], list[Call]]
"""Rollout and name of the tool → its calls, in the order in which they were made."""


def timed_tools(tools: Mapping[str, Callable[..., Any]], row: int, times: Times) -> dict[str, Callable[..., Any]]:
    """Return tools, sync or async, that note in ``times`` how long their calls for a rollout take."""
    return {name: _timed(function, times.setdefault((row, name), [])) for name, function in tools.items()}


def _timed(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def begun() -> Call:
        calls.append(Call())
        return calls[-1]

    @wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        with _measured(begun()):
            return function(*given, **named)

    @wraps(function)
    def run_later(*given: Any, **named: Any) -> Any:
        return _awaited(function(*given, **named), begun())

    return run_later if inspect.iscoroutinefunction(function) else run


async def _awaited(result: Awaitable[Any], call: Call) -> Any:
    with _measured(call):  # from when it runs: the event loop may come to it later
        return await result


@contextmanager
def _measured(call: Call) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        call.seconds = time.perf_counter() - start
