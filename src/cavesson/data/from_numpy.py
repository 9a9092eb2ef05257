"""Values of NumPy and PyTorch as those of Python."""

from typing import Any


def from_numpy(value: Any) -> Any:
    """Convert NumPy scalars, NumPy arrays and tensors to Python numbers and lists; other values are left unchanged.

    Dates and durations are left unchanged, too: NumPy would convert those in nanoseconds to integers.
    """
    is_date = getattr(getattr(value, "dtype", None), "kind", None) in ("M", "m")
    return value.tolist() if hasattr(value, "tolist") and not is_date else value
