"""What an environment's own methods are called with, and what they may return."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from cavesson.errors import UserCodeError, user_code
from cavesson.rollout.calling import Caller, as_text
from cavesson.rollout.environments import Instance
from cavesson.rollout.rewards.answers import AnswerError, checked
from cavesson.text.counting import counted


def reset(caller: Caller, instance: Instance, row: Mapping[str, Any]) -> "Future[str | None]":
    """Begin an episode with a row of the data; a text joins the last user message."""
    return _called(caller, instance, "reset", _text, instance.kind.taken(row))


def user_reply(caller: Caller, instance: Instance, answer: str) -> "Future[str | None]":
    """Return what the user says to the model's answer, or None if the episode ends with it."""
    return _called(caller, instance, "user_reply", _text, {"answer": answer} if instance.kind.hears else {})


def get_reward(caller: Caller, instance: Instance) -> "Future[float | None]":
    """Return the reward of the episode, or None if it is not scored."""
    return _called(caller, instance, "get_reward", _number)


def is_done(instance: Instance) -> bool:
    """Return whether the episode ends after the present turn."""
    with user_code(f"`done` of the environment {instance.kind.label}"):
        return bool(getattr(instance.environment, "done", False))


def turn_rewards(instance: Instance, turns: int) -> list[float | None] | None:
    """Return one reward per turn of the assistant, or None if the environment does not define them."""
    what = f"turn_rewards of the environment {instance.kind.label}"
    with user_code(what):
        given = getattr(instance.environment, "turn_rewards", None)
        if given is None:
            return None
        values = list(given)
    if len(values) != turns:
        raise UserCodeError(f"{what}: {counted(len(values), 'reward')} for {counted(turns, 'turn')}")
    return checked(what, values, turns)[what].values


def _called(
    caller: Caller,
    instance: Instance,
    method: str,
    accept: Callable[[str, Any], Any],
    arguments: Mapping[str, Any] | None = None,
) -> "Future[Any]":
    what = f"{method} of the environment {instance.kind.label}"
    return caller.submit(what, getattr(instance.environment, method), arguments or {}, partial(accept, what))


def _text(what: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise UserCodeError(f"{what} returned a value of type {type(value).__name__}; it must return text or None")
    return as_text(what, value)


def _number(what: str, value: Any) -> float | None:
    try:
        return checked(what, [value], 1)[what].values[0]
    except AnswerError:
        raise UserCodeError(f"{what} returned {value!r}; it must return a finite number or None") from None
