"""Values of CSV cells that spreadsheets open."""

import json
import re
from typing import Any

FORMULA = re.compile(r"""'*[\t\r\n]|[\s\x00-\x1f\x85\u200b-\u200f\u2060\ufeff'"]*[=+\-@＝＋－＠]""")
"""How a cell begins that a spreadsheet may take for a formula, which may read other cells and call other programs.

Some programs ignore what cannot be seen, or quotes, before the sign, and read full-width signs as plain ones. What
begins like a quoted text is quoted as well, so that removing the quotes gives the text.
"""


def cell(value: Any, quote_formulas: bool) -> Any:
    """Return a value for a CSV cell: lists and dicts become JSON; other values, except some texts, stay unchanged.

    With `quote_formulas`, a text that a spreadsheet would read as a formula gets a ``'`` in front. Whoever reads it
    again knows a quoted text by the ``'`` and by its rest, which would be quoted.
    """
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return f"'{value}" if quote_formulas and isinstance(value, str) and FORMULA.match(value) else value
