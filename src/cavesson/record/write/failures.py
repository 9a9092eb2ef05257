"""Which calls of tools have failed."""

import ast
import json


def error_in(text: str | None) -> str | None:
    """Return the error of a result that is ``{"error": …}``, as JSON or as Python writes it, and nothing else."""
    if text is None or not text.lstrip().startswith("{") or "error" not in text:
        return None
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) and found.keys() == {"error"} and found["error"] is not None:
            return str(found["error"])
    return None
