"""What a reward is: any function of prompts and responses, and the parts it may return."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from dressage.errors import UserError

RewardFunction = Callable[..., Sequence[float] | Mapping[str, Sequence[float]]]
"""`(prompts, responses, **columns) -> one number per response, or named parts of one number per response each`"""


def call_reward(
    function: RewardFunction, name: str, prompts: Sequence[str], responses: Sequence[str], columns: Mapping[str, Any]
) -> dict[str, list[float]]:
    """Call a reward and check what it returns.

    Returns:
        its parts by name; a reward that returns plain numbers has one part of its own name.

    Raises:
        UserError: not one finite number per response.
    """
    result = function(prompts, responses, **columns)
    if result is None:
        raise UserError(f"the reward {name} returned None; it must return one number per response")
    parts = dict(result) if isinstance(result, Mapping) else {"": result}
    if not parts:
        raise UserError(f"the reward {name} returned no part; it must return one number per response")
    checked = {}
    for part, values in parts.items():
        label = f"{name}/{part}" if part else name
        checked[label] = _numbers(label, values, len(responses))
    return checked


def _numbers(label: str, values: Any, expected: int) -> list[float]:
    if hasattr(values, "tolist"):  # numpy arrays and tensors
        values = values.tolist()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise UserError(f"the reward {label} returned {values!r}; it must return one number per response")
    if len(values) != expected:
        raise UserError(f"the reward {label} returned {len(values)} values for {expected} responses")
    for row, value in enumerate(values):
        if not isinstance(value, Real):
            raise UserError(f"the reward {label} returned {value!r} for response {row}; it must return numbers")
        if not math.isfinite(value):
            raise UserError(f"the reward {label} returned {value} for response {row}; it must return finite numbers")
    return [float(value) for value in values]
