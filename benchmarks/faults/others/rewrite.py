"""Change single expressions in the source of a function that is installed, at run time."""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any


class Moved(Exception):
    """The installed source is not the one that the change was written for."""


def rewritten(function: Callable[..., Any], owner: Any, changes: Sequence[tuple[str, str]]) -> Any:
    """Return the function compiled again from its own source, in which each ``old`` is replaced by ``new``.

    Args:
        function: A function or method with source; it keeps its module's globals and its decorators.
        owner: The class that it belongs to, for ``super()``; None for a plain function.
        changes: Pairs (old, new) of source text.

    Raises:
        Moved: An ``old`` does not occur exactly once.
    """
    plain: FunctionType = inspect.unwrap(function)  # type: ignore[assignment]
    source = textwrap.dedent(inspect.getsource(plain))
    for old, new in changes:
        if source.count(old) != 1:
            raise Moved(f"{plain.__qualname__} has {source.count(old)} places like {old!r}, expected 1")
        source = source.replace(old, new)
    # A function around it gives ``super()`` the cell that it looks for.
    maker = f"def make(__class__):\n{textwrap.indent(source, '    ')}\n    return {plain.__name__}\n"
    made: dict[str, Any] = {}
    exec(compile(maker, f"<{plain.__qualname__}, rewritten>", "exec"), plain.__globals__, made)
    return made["make"](owner)
