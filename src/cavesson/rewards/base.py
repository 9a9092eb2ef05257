"""Loading and calling rewards: any function of prompts and responses that returns numbers, or named parts of them."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from hashlib import sha256
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cavesson.errors import UserCodeError, UserError, user_code
from cavesson.rewards.surroundings import put_back, still_running
from cavesson.text.counting import counted

RewardFunction = Callable[..., Sequence[float] | Mapping[str, Sequence[float]]]
"""`(prompts, responses, **columns) -> one number per response, or named parts of one number per response each`"""

_LARGEST = float(np.finfo(np.float32).max)
"""Rewards are trained on as float32."""
_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Files that were executed: what they were then (time of the change, size), and their modules."""
_PROMPTS, _RESPONSES = {"prompt", "prompts"}, {"response", "responses", "completion", "completions"}


def call_reward(
    function: RewardFunction, name: str, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Call a reward with copies of its arguments, so that it cannot change them, and check what it returns.

    Args:
        function: the reward; without a `**` parameter, it gets only the columns that it names.
        name: the name of the reward.
        prompts: [B]
        responses: [B]
        columns: [B] each

    Returns:
        The parts by name; a reward that returns plain numbers has one part, with the name of the reward.

    Raises:
        UserCodeError: it takes other arguments, raises an exception, or does not return one finite number per response.
    """
    given = _given(function, name, columns)
    with user_code(f"copying the data's columns for the reward {name}"):
        copies = deepcopy(dict(given))
    try:
        with put_back(), still_running(f"the reward {name}"), user_code(f"the reward {name}"):
            return _parts(name, function(list(prompts), list(responses), **copies), len(responses))
    except _AnswerError as error:
        raise UserCodeError(f"{error}{_line(function)}") from None
    except UserCodeError:
        raise
    except UserError as error:  # a built-in reward failed, which a run can continue after too
        raise UserCodeError(str(error)) from error


class _AnswerError(UserCodeError):
    """A reward returned something that is not a number per response."""


def _parts(name: str, result: Any, expected: int) -> dict[str, list[float]]:
    """Check what a reward returned, and return the numbers by the names of their parts."""
    if result is None:
        raise _AnswerError(f"the reward {name} returned None; it must return one number per response")
    parts = dict(result) if isinstance(result, Mapping) else {"": result}
    if not parts:
        raise _AnswerError(f"the reward {name} returned no part; it must return one number per response")
    labels = {part: f"{name}/{part}" if part else name for part in parts}
    return {labels[part]: _numbers(labels[part], values, expected) for part, values in parts.items()}


def _given(function: RewardFunction, name: str, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the columns that a reward takes.

    Raises:
        UserCodeError: it cannot be called with prompts, responses and these columns.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return columns
    parameters = [*signature.parameters.values()]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    # The data may have a column called prompt or response, as the first two parameters may be.
    taken = {one.name for one in parameters[:2] if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)}
    named = {one.name for one in parameters} - taken
    given = {key: value for key, value in columns.items() if key not in taken and (takes_all or key in named)}
    problem = next(_problems(signature, given), None)
    if problem is None:
        return given
    has = f"; the data has {', '.join(columns)} besides the prompt" if columns else "; the data has no other column"
    raise UserCodeError(
        f"the reward {name}{signature}{_line(function)} {problem}\n"
        f"a reward is called with (prompts, responses, **columns){has}"
    )


def _problems(signature: inspect.Signature, columns: Mapping[str, Any]) -> Iterator[str]:
    """Yield reasons why a function cannot be called as a reward, or would get an argument in the wrong place.

    Rewards written for other trainers may have another order of arguments.
    """
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
        raise _AnswerError(f"the reward {label} returned {_short(values)}; it must return one number per response")
    if len(values) != expected:
        raise _AnswerError(
            f"the reward {label} returned {counted(len(values), 'value')} for {counted(expected, 'response')}"
        )
    return [_number(value, f"the reward {label} returned {{}} for response {row}") for row, value in enumerate(values)]


def _plain(value: Any) -> Any:
    """Convert NumPy scalars, NumPy arrays and tensors to Python numbers.

    Dates are left unchanged, because NumPy would convert them to integers.
    """
    is_date = getattr(getattr(value, "dtype", None), "kind", None) in ("M", "m")
    return value.tolist() if hasattr(value, "tolist") and not is_date else value


def _number(value: Any, returned: str) -> float:
    plain = _plain(value)
    if not isinstance(plain, Real):
        raise _AnswerError(f"{returned.format(_short(value))}; it must return numbers")
    try:
        number = float(plain)
    except OverflowError:  # an int that is too large for a float
        number = float("inf")
    if not abs(number) <= _LARGEST:  # this form rejects NaN too
        raise _AnswerError(f"{returned.format(_short(plain))}; it must return finite numbers up to {_LARGEST:.3g}")
    return number


def _short(value: Any) -> str:
    """Return a value as text, shortened; Python refuses to convert very long integers to text."""
    if isinstance(value, int) and value.bit_length() > 300:
        return "an integer of more than 90 digits"
    text = str(value) if isinstance(value, Real) else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def load_function(name: str) -> RewardFunction:
    """Load a reward given as "file.py:function" or "module:function".

    Raises:
        UserError: the file, module or function does not exist, or importing it raises an exception.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(f"reward {name!r}: write file.py:function or module:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"reward {name!r}: {place} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _from_file(file: Path) -> object:
    """Return the module of a file, which is executed once for all of its functions, and again when it has changed."""
    place = file.resolve()
    if not place.is_file():
        raise UserError(f"reward {file}: there is no such file")
    state = place.stat()
    stamp = (state.st_mtime_ns, state.st_size)
    if place not in _FILES or _FILES[place][0] != stamp:
        _FILES[place] = stamp, _executed(file, place)
    return _FILES[place][1]


def _executed(file: Path, place: Path) -> ModuleType:
    # A file called random.py must not shadow the module `random`, nor two files of the same name each other.
    name = f"cavesson_reward_{file.stem}_{sha256(bytes(place)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that objects defined in the file can be pickled and found by name
    with user_code(f"the reward's file {file.name}"):
        spec.loader.exec_module(module)
    return module


def _from_module(place: str) -> object:
    with user_code(f"the reward's module {place}"):
        return importlib.import_module(place)
