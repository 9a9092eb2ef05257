import math
import sys
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np


def rollouts(count: int = 2, width: int = 3, **columns: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Rows and tokens of one call; every response fills its ``width``."""
    rows = {
        "sample": np.arange(count),
        "prompt": [f"prompt {i}" for i in range(count)],
        "response": [f"response {i}" for i in range(count)],
        "reward": np.arange(count, dtype=np.float64),
    }
    return rows | columns, {"mask": np.ones((count, width), np.bool_)}


def plain(value: Any) -> str:
    """A text that is the same for equal values only: NaN equals NaN, 0.0 differs from -0.0 and from 0."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {plain(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(plain, value)) + "]"
    return repr(value)


def kept(name: str, values: np.ndarray) -> np.ndarray:
    """What the recorder should keep of a token column, rounded number by number with fractions and float16."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    flat = [float(value) for value in values.ravel()]
    with np.errstate(over="ignore"):
        narrow = [float(np.float32(value)) for value in flat]
    end = sys.float_info.max
    if not any(math.isinf(new) and math.isfinite(old) for new, old in zip(narrow, flat, strict=True)):
        flat, end = narrow, (2 - 2**-23) * 2.0**127
    one = _on_the_grid if name.endswith("logprob") else _as_float16
    found = [one(value) if math.isfinite(value) else value for value in flat]
    # What rounding would lead past the end of the column's numbers stays as it is.
    kept = [new if abs(new) <= end else old for new, old in zip(found, flat, strict=True)]
    return np.array(kept).reshape(values.shape)


def _on_the_grid(value: float) -> float:
    return float(Fraction(round(Fraction(value) * 2**17), 2**17))


def _as_float16(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    try:
        return math.ldexp(float(np.float16(mantissa)), exponent)
    except OverflowError:
        return value
