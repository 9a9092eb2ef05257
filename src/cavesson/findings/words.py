"""Numbers and phrases in the texts of findings."""

import math

import numpy as np


class Phrase(str):
    """A part of a text that is translated, as opposed to text from the user's data."""


class Percent(float):
    """A number relative to another one, such as its start, shown in per cent; it can be negative or above 100 %."""


class Share(Percent):
    """A part of a whole, from 0 % to 100 %."""


def number(value: float) -> str:
    """Return a readable number: three significant digits, an exponent only if needed, and shares in per cent."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if isinstance(value, Percent):
        return f"{100 * value:{'.0f' if abs(value) >= 0.1 else '.2g'}} %".replace("-", "−")
    if value == int(value) and abs(value) < 1e6:
        text = f"{int(value)}"
    elif 1e-4 <= abs(value) < 1e5:
        value = float(f"{value:.2e}") if abs(value) < 100 else value
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    else:
        text = f"{value:.2e}"
    return text.replace("-", "−")


def exact(value: float) -> str:
    """Return a limit as it was stated: all its digits, no exponent, and shares in per cent."""
    if isinstance(value, Percent):
        return f"{100 * value:g} %"
    return np.format_float_positional(value, trim="-").replace("-", "−")
