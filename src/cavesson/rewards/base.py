"""What a reward is: any function of prompts and responses, and the parts it may return."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

import numpy as np

from cavesson.errors import UserCodeError, told

RewardFunction = Callable[..., Sequence[float] | Mapping[str, Sequence[float]]]
"""`(prompts, responses, **columns) -> one number per response, or named parts of one number per response each`"""

_LARGEST = float(np.finfo(np.float32).max)
"""Rewards are trained on as float32."""
_PROMPTS, _RESPONSES = {"prompt", "prompts"}, {"response", "responses", "completion", "completions"}


def call_reward(
    function: RewardFunction, name: str, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Call a reward with copies of everything, so that it can change nothing, and check what it returns.

    Args:
        function: the reward; without a `**` parameter it gets only the columns that it names.
        name: what it is called.
        prompts: [B]
        responses: [B]
        columns: [B] each

    Returns:
        its parts by name; a reward that returns plain numbers has one part of its own name.

    Raises:
        UserCodeError: it takes other arguments, raises something, or returns not one finite number per response.
    """
    given = _given(function, name, columns)
    with told(f"copying the data's columns for the reward {name}"):
        copies = deepcopy(dict(given))
    with told(f"the reward {name}"):
        result = function(list(prompts), list(responses), **copies)
        result = dict(result) if isinstance(result, Mapping) else result
    try:
        return _parts(name, result, len(responses))
    except UserCodeError as error:
        raise UserCodeError(f"{error}{_line(function)}") from None


def _parts(name: str, result: Any, expected: int) -> dict[str, list[float]]:
    """What a reward returned, checked, by the names of its parts."""
    if result is None:
        raise UserCodeError(f"the reward {name} returned None; it must return one number per response")
    parts = result if isinstance(result, dict) else {"": result}
    if not parts:
        raise UserCodeError(f"the reward {name} returned no part; it must return one number per response")
    labels = {part: f"{name}/{part}" if part else name for part in parts}
    return {labels[part]: _numbers(labels[part], values, expected) for part, values in parts.items()}


def _given(function: RewardFunction, name: str, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns that a reward takes."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # as of some functions written in C
        return columns
    parameters = signature.parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    named = {one.name for one in [*parameters][2:]} | {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    given = columns if takes_all else {key: value for key, value in columns.items() if key in named}
    problem = next(_problems(signature, given), None)
    if problem is None:
        return given
    has = f"; the data has {', '.join(columns)} beside the prompt" if columns else "; the data has no other column"
    raise UserCodeError(
        f"the reward {name}{signature}{_line(function)} {problem}\n"
        f"a reward is called with (prompts, responses, **columns){has}"
    )


def _problems(signature: inspect.Signature, columns: Mapping[str, Any]) -> Iterator[str]:
    """Why a function cannot be called as a reward, or would take one thing for another, as other trainers' do."""
    positional = [n for n, p in signature.parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for place, parameter in enumerate(positional):
        if (parameter in _PROMPTS and place != 0) or (parameter in _RESPONSES and place != 1):
            yield f"takes {parameter} as argument {place + 1}"
    try:
        signature.bind((), (), **columns)
    except TypeError as error:
        yield f"cannot be called: {error}"


def _line(function: RewardFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _numbers(label: str, values: Any, expected: int) -> list[float]:
    values = _plain(values)
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UserCodeError(f"the reward {label} returned {_short(values)}; it must return one number per response")
    if len(values) != expected:
        raise UserCodeError(
            f"the reward {label} returned {_count(len(values), 'value')} for {_count(expected, 'response')}"
        )
    return [_number(value, f"the reward {label} returned {{}} for response {row}") for row, value in enumerate(values)]


def _plain(value: Any) -> Any:
    """Python's own numbers of a NumPy scalar or array or a tensor; dates, which NumPy makes integers of, stay."""
    is_date = getattr(getattr(value, "dtype", None), "kind", None) in ("M", "m")
    return value.tolist() if hasattr(value, "tolist") and not is_date else value


def _number(value: Any, returned: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, Real):
        raise UserCodeError(f"{returned.format(_short(value))}; it must return numbers")
    try:
        number = float(plain)
    except OverflowError:  # of an int that no float holds
        number = float("inf")
    if not abs(number) <= _LARGEST:  # NaN neither
        raise UserCodeError(f"{returned.format(_short(plain))}; it must return finite numbers up to {_LARGEST:.3g}")
    return number


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _short(value: Any) -> str:
    """The beginning of a value; Python refuses to write very long integers."""
    if isinstance(value, int) and value.bit_length() > 300:
        return "an integer of more than 90 digits"
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
