"""Functions and classes of the user, which settings name."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from cavesson.errors import UserError, user_code

_FILES: dict[Path, tuple[tuple[int, int], ModuleType]] = {}
"""Files that were executed: what they were then (time of the change, size), and their modules."""


def line_of(function: Callable[..., Any]) -> str:
    """Return where a function is defined, in parentheses, or "" if it is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def load_function(name: str, what: str = "reward") -> Callable[..., Any]:
    """Load a reward, or other code of the user, given as "file.py:function" or "module:function"; messages call it
    `what`.

    Raises:
        UserError: the file, module or function does not exist, or importing it raises an exception.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(f"{what} {name!r}: write file.py:function or module:function")
    module = _from_file(Path(place), what) if place.endswith(".py") else _from_module(place, what)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"{what} {name!r}: {place} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _from_file(file: Path, what: str) -> object:
    """Return the module of a file, which is executed once for all of its functions, and again when it has changed."""
    place = file.resolve()
    if not place.is_file():
        raise UserError(f"{what} {file}: there is no such file")
    state = place.stat()
    stamp = (state.st_mtime_ns, state.st_size)
    if place not in _FILES or _FILES[place][0] != stamp:
        _FILES[place] = stamp, _executed(file, place, what)
    return _FILES[place][1]


def _executed(file: Path, place: Path, what: str) -> ModuleType:
    # A file called random.py must not shadow the module `random`, nor two files of the same name each other.
    name = f"cavesson_reward_{file.stem}_{sha256(bytes(place)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that objects defined in the file can be pickled and found by name
    with user_code(f"the {what}'s file {file.name}"):
        spec.loader.exec_module(module)
    return module


def _from_module(place: str, what: str) -> object:
    with user_code(f"the {what}'s module {place}"):
        return importlib.import_module(place)
