"""Columns of a row as JSON, for the record."""

import json
import math
from collections.abc import Mapping
from typing import Any

from cavesson.data.from_numpy import from_numpy


def as_json(columns: Mapping[str, Any]) -> str:
    """Return a JSON object of columns. What JSON cannot hold, such as dates, bytes and NaN, becomes a text."""
    text = json.dumps(_plain(columns), ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair is not UTF-8; JSON can escape it.
    return text.encode(errors="backslashreplace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    converted = from_numpy(value)
    return str(value) if type(converted) is type(value) else _plain(converted)
