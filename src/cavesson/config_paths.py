"""Locations of the files and folders named in settings.

A path in a recipe is resolved relative to the recipe, then relative to the working directory; a path in a flag or in
Python, relative to the working directory. A path that exists becomes absolute, so that a run can be resumed from any
directory. A path that does not exist may be a name on the Hub and stays unchanged.
"""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

BUILT_IN = ("tiny", "package:")
"""What a name begins with that is never looked for on disk."""


class RecipeText(str):
    """A string from a recipe, with the folder of that recipe."""

    folder: Path


def in_folder(value: Any, folder: Path) -> Any:
    """Return the values of a recipe with every string replaced by a `RecipeText` of its folder."""
    if isinstance(value, dict):
        return {key: in_folder(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [in_folder(one, folder) for one in value]
    if not isinstance(value, str):
        return value
    text = RecipeText(value)
    text.folder = folder
    return text


def full_path(value: Any) -> Any:
    """Return the absolute path if the value names an existing file or folder; return any other value unchanged."""
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or value == BUILT_IN[0] or value.startswith(BUILT_IN[1]):
        return value
    return _found(value, _folders(value))


def full_function(value: Any) -> Any:
    """Return "file.py:function" with the absolute path of the file; return any other value unchanged."""
    place, colon, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{_found(place, _folders(value))}{colon}{function}" if place.endswith(".py") else value


def expanded(name: str) -> Path:
    """Return a path with a leading ``~`` or ``~user`` expanded; the path of an unknown user stays unchanged."""
    return Path(os.path.expanduser(name))


def _folders(value: str) -> Sequence[Path]:
    return (value.folder, Path()) if isinstance(value, RecipeText) else (Path(),)


def _found(name: str, folders: Sequence[Path]) -> str:
    # A long text, such as a template, is not a file name; asking the operating system about it would fail.
    if not name or len(name) > 4096 or "\n" in name or "\0" in name:
        return str(name)
    for candidate in (folder / expanded(name) for folder in folders):
        if os.path.exists(candidate) or (glob.has_magic(name) and glob.glob(str(candidate), recursive=True)):
            return os.path.abspath(candidate)
    return str(name)


LocalPath = Annotated[str, BeforeValidator(full_path)]
"""The type of a setting that names a file or a folder, or something on the Hub."""
FunctionName = Annotated[str, BeforeValidator(full_function)]
"""The type of a setting that names a function, perhaps in a file."""
