"""What rewards return, and its checks: a number per response, None for no judgement, and reasons beside numbers."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from cavesson.data.from_numpy import from_numpy
from cavesson.errors import UserCodeError
from cavesson.text.counting import counted
from cavesson.text.visible import shortened

_LARGEST = float(np.finfo(np.float32).max)
"""Rewards are trained on as float32."""


class AnswerError(UserCodeError):
    """A reward returned something that is not a number per response."""


class Part(NamedTuple):
    """One part of a reward for B responses."""

    values: list[float | None]
    """None for a response that it does not judge"""
    reasons: list[str | None]
    """None where it gave no reason"""


Answers = dict[str, dict[str, Part]]
"""The parts of rewards, by the names of both."""


def checked(name: str, result: Any, expected: int) -> dict[str, Part]:
    """Check what a reward returned for `expected` responses.

    Returns:
        Its parts by name; a reward that returns plain numbers has one part, with the name of the reward.

    Raises:
        AnswerError: it is something else.
    """
    if result is None:
        raise AnswerError(f"the reward {name} returned None; it must return one number per response")
    parts = dict(result) if isinstance(result, Mapping) else {"": result}
    if not parts:
        raise AnswerError(f"the reward {name} returned no part; it must return one number per response")
    labels = {part: f"{name}/{part}" if part else name for part in parts}
    return {labels[part]: _part(labels[part], values, expected) for part, values in parts.items()}


def _part(label: str, values: Any, expected: int) -> Part:
    values = from_numpy(values)
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise AnswerError(f"the reward {label} returned {_short(values)}; it must return one number per response")
    if len(values) != expected:
        raise AnswerError(
            f"the reward {label} returned {counted(len(values), 'value')} for {counted(expected, 'response')}"
        )
    pairs = [_pair(value, f"the reward {label} returned {{}} for response {row}") for row, value in enumerate(values)]
    return Part([number for number, _ in pairs], [reason for _, reason in pairs])


def _pair(value: Any, returned: str) -> tuple[float | None, str | None]:
    """Return a number or None, and the reason that may stand beside it."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str):
        return _number(value[0], returned), value[1]
    return _number(value, returned), None


def _number(value: Any, returned: str) -> float | None:
    if value is None:
        return None
    plain = from_numpy(value)
    if not isinstance(plain, Real) or isinstance(plain, np.timedelta64):  # for NumPy, a duration is an integer
        raise AnswerError(f"{returned.format(_short(value))}; it must return numbers, None, or (number, reason)")
    try:
        number = float(plain)
    except OverflowError:  # an int that is too large for a float
        number = float("inf")
    if not abs(number) <= _LARGEST:  # this form rejects NaN too
        raise AnswerError(f"{returned.format(_short(plain))}; it must return finite numbers up to {_LARGEST:.3g}")
    return number


def _short(value: Any) -> str:
    """Return a value as text, shortened; Python refuses to convert very long integers to text."""
    if isinstance(value, int) and value.bit_length() > 300:
        return "an integer of more than 90 digits"
    return shortened(str(value) if isinstance(value, Real) else repr(value), 100)
