from collections.abc import Mapping
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
