"""Loading a user's reward function from a file or module."""

import importlib
import importlib.util
import sys
from pathlib import Path

from cavesson.errors import UserError, told
from cavesson.rewards.base import RewardFunction


def load_function(name: str) -> RewardFunction:
    """Load a reward given as "file.py:function" or "module:function".

    Raises:
        UserError: the file, module or function does not exist, or importing it raises an exception.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        raise UserError(f"reward {name!r}: write file.py:function or module:function")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"reward {name!r}: {place} has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _from_file(file: Path) -> object:
    name = f"cavesson_reward_{file.stem}"  # a file called random.py must not shadow the module `random`
    spec = importlib.util.spec_from_file_location(name, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise UserError(f"reward {file}: there is no such file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that objects defined in the file can be pickled and found by name
    with told(f"the reward's file {file.name}"):
        spec.loader.exec_module(module)
    return module


def _from_module(place: str) -> object:
    with told(f"the reward's module {place}"):
        return importlib.import_module(place)
