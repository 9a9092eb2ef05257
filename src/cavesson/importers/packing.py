"""Lists of numbers and texts in a compact form, so that millions of tokens fit into memory."""

import math
from operator import countOf
from struct import Struct, error
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import pyarrow as pa

from cavesson.record.precision import Array

EXACT = 2**53
"""From here on float64 has no room for every whole number."""


class PackedNumbers(NamedTuple):
    """A list of numbers as native float64, so that no Python object per number is kept."""

    content: bytes
    size: int
    missing: tuple[int, ...] = ()
    """Where the source has null; ``content`` has NaN there."""


class PackedTexts(NamedTuple):
    """A list of texts: their concatenation, and the number of characters of each."""

    content: str
    lengths: list[int]
    missing: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return len(self.lengths)


Values = PackedNumbers | PackedTexts


def pack(values: Any) -> PackedNumbers | None:
    """Pack a list of numbers and nulls; return None for anything else, or if float64 cannot represent it exactly."""
    if not isinstance(values, list):
        return None
    try:
        content = Struct(f"{len(values)}d").pack(*values)
    except (error, OverflowError):
        return _pack_with_nulls(values)
    # Booleans would pack as numbers too, and integers beyond 2^53 would lose digits.
    if countOf(map(type, values), float) == len(values) or all(map(is_number, values)):
        return PackedNumbers(content, len(values))
    return None


def _pack_with_nulls(values: list[Any]) -> PackedNumbers | None:
    if not all(value is None or is_number(value) for value in values):
        return None
    missing = tuple(i for i, value in enumerate(values) if value is None)
    filled = [math.nan if value is None else value for value in values]
    return PackedNumbers(Struct(f"{len(filled)}d").pack(*filled), len(filled), missing)


def unpack(values: Values | None) -> Array | None:
    """Return packed numbers as an array, float64 with NaN for nulls; None for anything else."""
    return np.frombuffer(values.content, np.float64) if isinstance(values, PackedNumbers) else None


def pack_whole(values: Any, low: int = -(2**31), high: int = 2**31 - 1) -> PackedNumbers | None:
    """Pack a list of integers within bounds; return None for anything else."""
    if isinstance(values, list) and all(type(value) is int and low <= value <= high for value in values):
        return PackedNumbers(Struct(f"{len(values)}d").pack(*values), len(values))
    return None


def pack_texts(values: Any) -> PackedTexts | None:
    """Pack a list of texts and nulls; return None for anything else."""
    if not isinstance(values, list):
        return None
    missing: tuple[int, ...] = ()
    try:
        content = "".join(values)
    except TypeError:
        if not all(value is None or isinstance(value, str) for value in values):
            return None
        missing = tuple(i for i, value in enumerate(values) if value is None)
        values = [value or "" for value in values]
        content = "".join(values)
    return PackedTexts(content, list(map(len, values)), missing) if is_text(content) else None


def pack_column(type_: pa.DataType, values: Any) -> Values | None:
    """Pack the list of a token column of this type; return None for a list that does not fit.

    A table of tokens cannot represent an empty list or trailing nulls.
    """
    if not isinstance(values, list) or not values or values[-1] is None:
        return None
    if pa.types.is_string(type_):
        return pack_texts(values)
    if pa.types.is_boolean(type_):
        return pack_whole([int(v) if isinstance(v, bool) else v for v in values], 0, 1)
    return pack_whole(values) if pa.types.is_integer(type_) else pack(values)


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is a string that UTF-8 can encode; JSON can contain escaped lone surrogates, which it cannot."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a float64 column can represent the value exactly."""
    return type(value) is float or (type(value) is int and abs(value) <= EXACT)
