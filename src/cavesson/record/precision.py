"""How exactly a recorded number is kept: fewer bits of noise are fewer bytes on disk."""

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
        """Returns float64 ``values`` on the grid; what is not finite stays."""
        # Adding 0 turns −0 into 0: a sign on nothing would be noise too.
        return np.asarray(np.ldexp(np.rint(np.ldexp(values, self.bits)), -self.bits) + 0.0)


@dataclass(frozen=True)
class Mantissa:
    """``bits`` bits after the leading one: a relative error of at most 2^−(bits + 1). float16 has 10."""

    bits: int

    def round(self, values: Array) -> Array:
        """Returns float64 ``values`` with so many bits; what is not finite stays."""
        mantissa, exponent = np.frexp(values)
        return np.asarray(np.ldexp(np.rint(np.ldexp(mantissa, self.bits + 1)), exponent - (self.bits + 1)))


Precision = Grid | Mantissa


def rounded(values: Array, precision: Precision) -> Array:
    """Returns ``values`` as float32 numbers of this ``precision``, in float64 if one is too large for float32."""
    exact = np.asarray(values, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = exact.astype(np.float32).astype(np.float64)
        kept, kind = (exact, np.float64) if np.any(np.isinf(narrow) & np.isfinite(exact)) else (narrow, np.float32)
        found = precision.round(kept)
    # Close to the end of the range rounding may lead past it; there a number is kept as it is.
    return np.where(np.abs(found) <= np.finfo(kind).max, found, kept)
