"""Calling rewards: any function of prompts and responses that returns numbers, or named parts of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

from cavesson.errors import UserCodeError, UserError, user_code
from cavesson.functions import line_of
from cavesson.rollout.rewards.answers import AnswerError, Answers, Part, checked
from cavesson.rollout.rewards.arguments import Arguments, Judged, arguments
from cavesson.rollout.rewards.concurrent import EachResponse, awaited, is_async, judges_one
from cavesson.rollout.rewards.surroundings import put_back, still_running

RewardFunction = Callable[..., Any]
"""`(prompts, responses, **columns) -> one number per response, or named parts of one number per response each`.

A number may be None, or a pair of a number and a reason. The function may be `async`.
"""


@dataclass(frozen=True)
class Remote:
    """A reward that is called in another process, in one call with the others that are called there."""

    call: Callable[[Sequence[str], Judged], Answers]
    """calls rewards, given by their names"""


def call_rewards(functions: Mapping[str, RewardFunction | Remote], judged: Judged) -> Answers:
    """Call rewards with copies of their arguments, so that they cannot change them, and check what they return.

    They are called one after the other; then those that are `async`, at the same time. Other processes do the same with
    the rewards that are called there.

    Returns:
        The parts of each; a reward that returns plain numbers has one part, with the name of the reward.

    Raises:
        UserCodeError: one takes other arguments, raises an exception, or does not return one finite number or None per
            response.
    """
    there = {name: one.call for name, one in functions.items() if isinstance(one, Remote)}
    here = {name: one for name, one in functions.items() if not isinstance(one, Remote)}
    answers = _called_here(here, judged) if here else {}
    for call in dict.fromkeys(there.values()):
        names = [name for name, its in there.items() if its == call]
        answers |= call(names, judged)
    return {name: answers[name] for name in functions}


def _called_here(functions: Mapping[str, RewardFunction], judged: Judged) -> Answers:
    each = {name: EachResponse(one, name) if judges_one(one) else one for name, one in functions.items()}
    calls = {name: _bound(function, name, judged) for name, function in each.items()}
    expected, answers = len(judged.responses), {}

    async def answer(name: str) -> dict[str, Part]:
        with _judging(name, each[name]):
            return checked(name, await calls[name](), expected)

    with put_back():
        for name, call in calls.items():
            if not is_async(each[name]):
                with _judging(name, each[name]):
                    answers[name] = checked(name, call(), expected)
        answers |= awaited({name: partial(answer, name) for name in calls if is_async(each[name])})
    return answers


def _bound(function: RewardFunction, name: str, judged: Judged) -> Callable[[], Any]:
    given = arguments(function, name, judged)
    with user_code(f"copying the data's columns for the reward {name}"):
        # Environments are the ones that were played, and may hold what cannot be copied.
        played = judged.columns.get("environments", ())
        own: Arguments = deepcopy(given, {id(one): one for one in played})
    return partial(function, *own.positional, **own.named)


@contextmanager
def _judging(name: str, function: RewardFunction) -> Iterator[None]:
    """Convert whatever the block raises to a UserCodeError, and say so if the block takes long."""
    try:
        with still_running(f"the reward {name}"), user_code(f"the reward {name}"):
            yield
    except AnswerError as error:
        raise UserCodeError(f"{error}{line_of(function)}") from None
    except UserCodeError:
        raise
    except UserError as error:  # a built-in reward failed, which a run can continue after too
        raise UserCodeError(str(error)) from error
