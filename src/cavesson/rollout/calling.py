"""Calls of the user's code for many episodes at the same time, each with a time limit."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import isawaitable
from threading import Thread
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from cavesson.errors import UserCodeError, in_a_line, place_of, user_code
from cavesson.functions import line_of
from cavesson.rollout.rewards.concurrent import event_loop, is_async
from cavesson.rollout.rewards.surroundings import still_running
from cavesson.rollout.tools import Tool, problem_of
from cavesson.rollout.types import Answered, Call

T = TypeVar("T")


class Outcome(NamedTuple):
    """What a call of the user's code returned, or why it returned nothing."""

    value: Any
    error: BaseException | None = None


class Caller:
    """Calls tools and methods of environments: `async` ones in an event loop, others in a thread each.

    At most `concurrency` calls run at the same time. Functions get copies of their arguments. A thread cannot be ended:
    a function that is not `async` runs on after the `timeout` of the call, and nobody waits for it.
    """

    def __init__(self, concurrency: int, timeout: float) -> None:
        self._free = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._running: dict[object, Any] = {}
        """The objects whose methods are running, by call."""

    def submit(
        self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any], accept: Callable[[Any], T]
    ) -> "Future[T]":
        """Call a function that must not fail; return what `accept` makes of its result, or a UserCodeError.

        `what` names the function in messages. `accept` raises a UserCodeError if the result is not what it should be.
        """
        return asyncio.run_coroutine_threadsafe(self._result(what, function, arguments, accept), event_loop())

    def is_busy(self, environment: object) -> bool:
        """Return whether a method of an environment is running, which may outlast its time limit."""
        return any(one is environment for one in [*self._running.values()])

    async def answer(self, tools: Mapping[str, Tool], call: Call) -> Answered:
        """Make a call with the tools of its episode, in the event loop of the user's code.

        One that cannot be made, fails, takes too long or returns what is not text gives an error
        that the model can read.
        """
        problem = call.error or problem_of(tools, call.name, call.arguments)
        if problem is not None:
            return _failed(problem, 0.0)
        what, function = f"the tool {call.name}", tools[call.name].function
        outcome, seconds = await self._limited(what, function, call.arguments, partial(as_text, what))
        if outcome.error is None:
            return Answered(outcome.value, seconds)
        cause = outcome.error.__cause__
        if cause is None:
            return _failed(str(outcome.error), seconds)
        return _failed(in_a_line(cause), seconds, place_of(cause))

    async def _result(
        self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any], accept: Callable[[Any], T]
    ) -> T:
        outcome, _ = await self._limited(what, function, arguments, accept)
        if outcome.error is None:
            return outcome.value  # type: ignore[no-any-return]
        place = line_of(function) if outcome.error.__cause__ is None else ""
        raise UserCodeError(f"{outcome.error}{place}") from outcome.error.__cause__

    async def _limited(
        self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any], accept: Callable[[Any], Any]
    ) -> tuple[Outcome, float]:
        """Return the outcome of a call and the seconds that it took."""
        async with self._free:
            begun = perf_counter()
            # Neither raises what the user's code raises, nor waits for code that ignores that it is cancelled.
            call = asyncio.ensure_future(self._outcome(what, function, arguments, accept))
            try:
                await asyncio.wait([call], timeout=self._timeout)
                seconds = perf_counter() - begun
                if call.done():
                    return call.result(), seconds
                return Outcome(None, UserCodeError(f"{what} returned nothing within {self._timeout:g} s")), seconds
            finally:
                call.cancel()

    async def _outcome(
        self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any], accept: Callable[[Any], Any]
    ) -> Outcome:
        try:
            with user_code(what):
                call = partial(self._called, what, function, arguments)
                result = call() if is_async(function) else await _in_a_thread(call)
                if isawaitable(result):
                    result = await self._awaited(what, function, result)
                return Outcome(accept(result))
        except BaseException as error:
            return Outcome(None, error)

    def _called(self, what: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        with self._watched(what, function):
            return function(**deepcopy(dict(arguments)))

    async def _awaited(self, what: str, function: Callable[..., Any], result: Awaitable[Any]) -> Any:
        with self._watched(what, function):
            return await result

    @contextmanager
    def _watched(self, what: str, function: Callable[..., Any]) -> Iterator[None]:
        """Say so if the block takes long, and convert whatever it raises to a UserCodeError."""
        call = object()
        self._running[call] = getattr(function, "__self__", None)
        try:
            with still_running(what), user_code(what):
                yield
        finally:
            del self._running[call]


def as_text(what: str, value: Any) -> str:
    """Return what the user's code returned as the text that the model reads: text as it is, anything else as JSON.

    Raises:
        UserCodeError: it is neither.
    """
    try:
        text = str.__str__(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # a lone surrogate cannot be
    except Exception as error:
        name = type(value).__name__
        raise UserCodeError(f"{what} returned a value of type {name} that is not text or JSON ({error})") from None
    return text


def _failed(message: str, seconds: float, place: str = "") -> Answered:
    """Return what a call gave that failed; only the record has the place in the user's files."""
    seen = message.encode(errors="backslashreplace").decode()  # a lone surrogate can be neither tokenised nor stored
    return Answered(json.dumps({"error": seen}, ensure_ascii=False), seconds, f"{seen}{place}")


def _in_a_thread(call: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Call a function in its own thread, which does not keep the process from ending; it raises UserErrors only."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def run() -> None:
        try:
            value, error = call(), None
        except BaseException as raised:
            value, error = None, raised
        loop.call_soon_threadsafe(settle, value, error)

    Thread(target=run, name="user-code", daemon=True).start()
    return future
