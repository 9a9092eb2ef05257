import asyncio
import json
import os
import sys
import threading
import time
from datetime import datetime
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavesson.errors import UserCodeError
from cavesson.rollout import contract
from cavesson.rollout.calling import Caller, as_text
from cavesson.rollout.environments import Environments, Kind
from cavesson.rollout.rewards.concurrent import event_loop
from cavesson.rollout.tools import Tool
from cavesson.rollout.types import Answered, Call

WAIT = 20.0
"""Seconds after which a test fails that waits for a call."""


def tool(function, *names):
    """Return a function as the only tool, whose arguments may have any type."""
    parameters = {"type": "object", "properties": {name: {} for name in names}, "required": [*names]}
    name = function.__name__
    return {name: Tool(name, {"type": "function", "function": {"name": name, "parameters": parameters}}, function)}


def begun(caller, tools, *calls):
    """Begin the calls of a turn, one after the other, as an episode does."""

    async def given():
        return [await caller.answer(tools, call) for call in calls]

    return asyncio.run_coroutine_threadsafe(given(), event_loop())


def answers(tools, *calls, timeout=WAIT, concurrency=4):
    return begun(Caller(concurrency, timeout), tools, *calls).result(WAIT)


def answer(function, timeout=WAIT, **arguments):
    (one,) = answers(tool(function, *arguments), Call(function.__name__, arguments), timeout=timeout)
    assert isinstance(one, Answered)
    return one


def echo(value):
    return value


async def echo_later(value):
    await asyncio.sleep(0)
    return value


def echo_awaitable(value):
    return echo_later(value)


@pytest.mark.parametrize("function", [echo, echo_later, echo_awaitable])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", "a\nb"),
        ("", ""),
        (6, "6"),
        (None, "null"),
        (True, "true"),
        ({"größe": [1, 2.5]}, '{"größe": [1, 2.5]}'),
    ],
)
def test_text_stays_as_it_is_and_json_values_become_json(function, value, text):
    one = answer(function, value=value)
    assert (one.text, one.error) == (text, None)
    assert one.seconds >= 0


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")), st.lists))
def test_what_is_not_text_is_read_back_from_json(value):
    text = as_text("the tool", value)
    assert text == value if isinstance(value, str) else json.loads(text) == value


CIRCULAR = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize(
    "value",
    [
        b"bytes",
        {1, 2},
        object(),
        datetime(2026, 1, 1),
        Decimal("1"),
        float("nan"),
        [float("inf")],
        "\ud800",
        ["\udfff"],
    ],
)
def test_what_is_neither_text_nor_json_is_an_error_that_the_model_reads(value):
    one = answer(echo, value=value)
    assert json.loads(one.text) == {"error": one.error}
    assert f"returned a value of type {type(value).__name__}" in one.error
    one.text.encode()


def test_a_circular_result_is_an_error():
    assert "type list" in answer(lambda_returning(CIRCULAR)).error


def lambda_returning(value):
    def give():
        return value

    return give


class Fatal(BaseException):
    def __str__(self):
        raise RuntimeError("no text either")


def raising(error, *arguments):
    def fail():
        raise error(*arguments)

    return fail


def raising_later(error, *arguments):
    async def fail():
        await asyncio.sleep(0)
        raise error(*arguments)

    return fail


@pytest.mark.parametrize("kind", [raising, raising_later])
@pytest.mark.parametrize(
    ("error", "seen"),
    [
        ((ValueError, "b is\nzero"), "ValueError: b is zero"),
        ((KeyboardInterrupt,), "KeyboardInterrupt"),
        ((SystemExit, 3), "SystemExit: 3"),
        ((GeneratorExit,), "GeneratorExit"),
        ((asyncio.CancelledError,), "CancelledError"),
        ((TimeoutError, "by itself"), "TimeoutError: by itself"),
        ((UserCodeError, "ours"), "ours"),
        ((Fatal,), "Fatal"),
        ((ValueError, "\ud800"), "ValueError: \\ud800"),
    ],
)
def test_any_exception_is_an_error_and_the_record_has_its_place(kind, error, seen):
    function = kind(*error)
    one = answer(function)
    assert json.loads(one.text) == {"error": seen}
    if error[0] is UserCodeError:
        assert one.error == seen
    else:
        line = function.__code__.co_firstlineno + (1 if kind is raising else 2)
        assert one.error.endswith(f"({__file__}, line {line})")
        assert __file__ not in one.text


def test_stop_iteration_is_an_error():
    assert json.loads(answer(raising(StopIteration, "end")).text) == {"error": "StopIteration: end"}


def test_the_loop_survives_whatever_a_tool_raises():
    for error in (SystemExit, KeyboardInterrupt, GeneratorExit):
        answer(raising_later(error))
        assert answer(echo_later, value="still here").text == "still here"


def test_calls_that_cannot_be_made():
    tools = tool(echo, "value")
    calls = [
        Call("ecko", {}),
        Call("echo", {}),
        Call("echo", {"value": 1, "b": 2}),
        Call("echo", {"value": 1}, "not JSON"),
    ]
    given = answers(tools, *calls)
    assert [one.text for one in given] == [json.dumps({"error": one.error}) for one in given]
    for one, word in zip(given, ["unknown tool 'ecko'", "'value'", "unexpected argument 'b'", "not JSON"], strict=True):
        assert word in one.error
        assert one.seconds == 0


def test_a_tool_cannot_change_the_call():
    arguments = {"items": [3, 1]}

    def first(items):
        items.sort()
        return items.pop(0)

    assert answer(first, **arguments).text == "1"
    assert arguments == {"items": [3, 1]}


def test_the_calls_of_a_turn_run_one_after_the_other():
    seen = []

    def slow(number):
        seen.append(number)
        time.sleep(0.05 if number == 0 else 0)
        seen.append(number)

    async def slow_too(number):
        seen.append(number)
        await asyncio.sleep(0.05)
        seen.append(number)

    tools = tool(slow, "number") | tool(slow_too, "number")
    answers(tools, *(Call(name, {"number": row}) for row, name in enumerate(["slow", "slow_too", "slow"])))
    assert seen == [0, 0, 1, 1, 2, 2]


def test_many_episodes_call_at_the_same_time_at_most_as_many_as_allowed():
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(3)

    def meet():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(WAIT)  # three must run at once, or none returns
        time.sleep(0.05)  # a fourth would be counted
        with lock:
            running -= 1

    caller = Caller(3, WAIT)
    turns = [begun(caller, tool(meet), Call("meet", {})) for _ in range(12)]
    assert all(turn.result(WAIT)[0].error is None for turn in turns)
    assert most == 3


def test_a_slow_tool_does_not_hold_up_the_others():
    ended = threading.Event()
    caller = Caller(2, WAIT)
    slow = begun(caller, tool(ended.wait), Call("wait", {}))
    for _ in range(5):
        assert begun(caller, tool(echo, "value"), Call("echo", {"value": "x"})).result(WAIT)[0].text == "x"
    assert not slow.done()
    ended.set()
    assert slow.result(WAIT)[0].text == "true"


def test_time_limits_of_functions_and_coroutines():
    ended = threading.Event()

    async def stubborn():
        while not ended.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    for function in (ended.wait, stubborn):
        one = answer(function, timeout=0.05)
        assert one.error == f"the tool {function.__name__} returned nothing within 0.05 s"
        assert json.loads(one.text) == {"error": one.error}
        assert 0.05 <= one.seconds < WAIT
    ended.set()


def test_stuck_calls_do_not_use_up_the_others_turns():
    ended = threading.Event()
    caller = Caller(1, 0.05)
    stuck = [begun(caller, tool(ended.wait), Call("wait", {})) for _ in range(3)]
    assert all(one.result(WAIT)[0].error for one in stuck)
    assert begun(caller, tool(echo_later, "value"), Call("echo_later", {"value": "x"})).result(WAIT)[0].text == "x"
    ended.set()


def test_the_time_that_a_call_waits_for_others_does_not_count():
    def nap():
        time.sleep(0.3)

    caller = Caller(1, 1.0)
    given = [begun(caller, tool(nap), Call("nap", {})) for _ in range(5)]
    assert [one.result(WAIT)[0].error for one in given] == [None] * 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows cannot fork")
def test_a_process_that_a_tool_forks_ends_with_the_call():
    def fork():
        child = os.fork()
        if child == 0:
            sys.exit(0)
        return os.waitpid(child, 0)[1]

    assert answer(fork).text == "0"


class Slow:
    def __init__(self):
        self.ended = threading.Event()

    def reset(self):
        return None

    def wait(self) -> str:
        """Wait."""
        self.ended.wait()
        return "ended"


def test_an_environment_whose_call_outlasts_its_time_is_busy_until_it_ends(caplog):
    environments = Environments({None: Slow})
    one, other = (environments.take(environments.of({})) for _ in range(2))
    caller = Caller(2, 0.05)
    assert begun(caller, one.tools, Call("wait", {})).result(WAIT)[0].error
    assert (caller.is_busy(one.environment), caller.is_busy(other.environment)) == (True, False)
    one.environment.ended.set()
    deadline = time.monotonic() + WAIT
    while caller.is_busy(one.environment):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert not caplog.records  # asyncio logs a result for which nobody waits


@pytest.mark.slow
def test_a_tool_that_runs_on_after_its_time_is_reported_every_minute(capsys):
    ended = threading.Event()
    assert answer(ended.wait, timeout=0.05).error
    time.sleep(61)
    ended.set()
    assert capsys.readouterr().err == "cavesson: the tool wait is still running after 60 s\n"


class Full:
    """An environment that defines everything."""

    def __init__(self):
        self.done, self.given, self.turn_rewards = False, None, None

    def reset(self, question, **row):
        row["tags"].append("changed")
        return question

    async def user_reply(self):
        return self.given

    def get_reward(self):
        return self.given


def instance(factory=Full):
    return Kind.of(None, factory, ()).instance(factory())


CALLER = Caller(4, WAIT)


def test_reset_gets_a_copy_of_the_row():
    row = {"question": "q", "tags": ["a"]}
    assert contract.reset(CALLER, instance(), row).result(WAIT) == "q"
    assert row["tags"] == ["a"]


def test_what_the_methods_of_an_environment_may_return():
    one = instance()
    assert contract.user_reply(CALLER, one, "said").result(WAIT) is None
    assert contract.get_reward(CALLER, one).result(WAIT) is None
    one.environment.given = "go on"
    assert contract.user_reply(CALLER, one, "said").result(WAIT) == "go on"
    one.environment.given = 1
    assert contract.get_reward(CALLER, one).result(WAIT) == 1.0


@pytest.mark.parametrize("value", ["1", float("nan"), float("inf"), 10**400, [1.0], {"a": 1.0}])
def test_a_reward_that_is_not_a_finite_number_is_the_users_error_with_its_place(value):
    one = instance()
    one.environment.given = value
    with pytest.raises(UserCodeError, match=r"get_reward of the environment Full returned .*finite number") as error:
        contract.get_reward(CALLER, one).result(WAIT)
    assert f"({__file__}, line {Full.get_reward.__code__.co_firstlineno})" in str(error.value)


@pytest.mark.parametrize("value", [1, ["text"], b"text", "\ud800"])
def test_a_reply_that_is_not_text_is_the_users_error(value):
    one = instance()
    one.environment.given = value
    with pytest.raises(UserCodeError, match="user_reply of the environment Full returned a value of type"):
        contract.user_reply(CALLER, one, "said").result(WAIT)


class Broken:
    def reset(self):
        raise KeyError("level")

    async def get_reward(self):
        sys.exit(4)

    def user_reply(self):
        time.sleep(0.5)


def test_an_environment_that_breaks_is_the_users_error_with_its_place():
    one = instance(Broken)
    line = Broken.reset.__code__.co_firstlineno + 1
    with pytest.raises(UserCodeError) as error:
        contract.reset(CALLER, one, {}).result(WAIT)
    assert str(error.value) == f"reset of the environment Broken raised KeyError: 'level' ({__file__}, line {line})"
    with pytest.raises(UserCodeError, match="get_reward of the environment Broken raised SystemExit: 4"):
        contract.get_reward(CALLER, one).result(WAIT)
    with pytest.raises(UserCodeError, match=f"user_reply .* returned nothing within 0.05 s .{__file__}"):
        contract.user_reply(Caller(1, 0.05), one, "said").result(WAIT)


def test_done_and_turn_rewards():
    one = instance()
    assert contract.is_done(one) is False
    assert contract.turn_rewards(one, 2) is None
    one.environment.done, one.environment.turn_rewards = True, [1, 0.5]
    assert contract.is_done(one) is True
    assert contract.turn_rewards(one, 2) == [1.0, 0.5]
    with pytest.raises(UserCodeError, match="2 rewards for 3 turns"):
        contract.turn_rewards(one, 3)
    one.environment.turn_rewards = [1.0, "x"]
    with pytest.raises(UserCodeError, match="turn_rewards of the environment Full"):
        contract.turn_rewards(one, 2)


class Lazy:
    def reset(self):
        return None

    @property
    def done(self):
        raise OSError("gone")


def test_a_property_that_breaks_is_the_users_error():
    with pytest.raises(UserCodeError, match="`done` of the environment Lazy raised OSError: gone"):
        contract.is_done(instance(Lazy))


def test_cancelling_a_turn_cancels_its_call():
    running, cancelled = threading.Event(), threading.Event()

    async def wait():
        running.set()
        try:
            await asyncio.sleep(WAIT)
        finally:
            cancelled.set()

    turn = begun(Caller(1, WAIT), tool(wait), Call("wait", {}))
    assert running.wait(WAIT)
    turn.cancel()
    assert cancelled.wait(WAIT)
