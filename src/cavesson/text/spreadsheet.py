"""Values in tables that spreadsheets open."""

import json
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet takes for a formula, which may read other cells and call other programs."""


def cell(value: Any, quote_formulas: bool) -> Any:
    """Return a value for a cell of CSV: lists and maps become JSON, what is neither these nor a text stays as it is.

    Args:
        value: Of any kind.
        quote_formulas: Put a ``'`` in front of a text that a spreadsheet would take for a formula.
    """
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if quote_formulas and isinstance(value, str) and value.startswith(FORMULA) else value
