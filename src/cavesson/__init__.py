"""Train language models with human feedback, with every token of every rollout on record.

The stub beside this file names each public name once, with the module that defines it. They are resolved on first use,
so that `import cavesson` is fast and does not need torch.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_HOMES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
_READING = ("cavesson.analysis", "cavesson.errors", "cavesson.record")
__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604: the names are strings


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("cavesson")
    if name not in _HOMES:
        raise AttributeError(f"module 'cavesson' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names; without torch, only those that can be imported."""
    if find_spec("torch") is not None:
        return sorted(__all__)
    return sorted(["__version__", *(name for name, home in _HOMES.items() if home in _READING)])
