"""Precision of recorded numbers: fewer bits of noise take fewer bytes on disk."""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Grid:
    """Multiples of 2 to the power of −``bits``: an absolute error, so that differences stay small and exact.

    A number moves by at most 2^−(bits + 1), the difference of two by at most 2^−bits.
    """

    bits: int

    def round(self, values: Array) -> Array:
        """Round float64 ``values`` to the grid; non-finite values are unchanged."""
        # Adding 0 turns −0 into 0: the sign of a zero would be noise too.
        return np.asarray(np.ldexp(np.rint(np.ldexp(values, self.bits)), -self.bits) + 0.0)


@dataclass(frozen=True)
class Mantissa:
    """``bits`` bits after the leading one: a relative error of at most 2^−(bits + 1). float16 has 10."""

    bits: int

    def round(self, values: Array) -> Array:
        """Round float64 ``values`` to ``bits`` bits; non-finite values are unchanged."""
        mantissa, exponent = np.frexp(values)
        return np.asarray(np.ldexp(np.rint(np.ldexp(mantissa, self.bits + 1)), exponent - (self.bits + 1)))


Precision = Grid | Mantissa


def rounded(values: Array, precision: Precision) -> Array:
    """Return ``values`` as float32 numbers of this ``precision``, or as float64 if one is too large for float32."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = exact.astype(np.float32).astype(np.float64)
        kept, kind = (exact, np.float64) if np.any(np.isinf(narrow) & np.isfinite(exact)) else (narrow, np.float32)
        found = precision.round(kept)
    # Rounding a number close to the end of the range may exceed it; such a number is left unchanged.
    return np.where(np.abs(found) <= np.finfo(kind).max, found, kept)
