"""Values of settings as a recipe has them."""

import json
from pathlib import Path
from typing import Any


def toml_value(value: Any) -> str:
    """Return a value as TOML: a text, a path, a number, a boolean, or a list or mapping of these."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_quoted(name)} = {toml_value(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return _quoted(str(value)) if isinstance(value, str | Path) else repr(value)


def _quoted(text: str) -> str:
    """Return a text in quotes; the escapes of JSON are those of TOML, which also has one for the sign 127."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
