"""Values of CSV cells that spreadsheets open."""

import json
from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that a spreadsheet takes for a formula, which may read other cells and call other programs."""


def cell(value: Any, quote_formulas: bool) -> Any:
    """Return a value for a CSV cell: lists and dicts become JSON; other values, except some texts, stay unchanged.

    Args:
        value: the value of the cell.
        quote_formulas: whether to put a ``'`` in front of a text that a spreadsheet would read as a formula.
    """
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if quote_formulas and isinstance(value, str) and value.startswith(FORMULA) else value
