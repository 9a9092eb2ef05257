"""Columns of a row as JSON, for the record."""

import json
import math
from collections.abc import Mapping
from typing import Any


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
    # numpy's arrays and numbers, and tensors; its dates would become numbers.
    is_date = getattr(getattr(value, "dtype", None), "kind", None) in ("M", "m")
    return str(value) if is_date or not hasattr(value, "tolist") else _plain(value.tolist())
