"""Where the files and folders are that settings name.

A path in a recipe is looked for beside the recipe, then in the working directory; a path in a flag or in Python in the
working directory. What is found becomes a full path, so that a run can be resumed from anywhere; what is not found may
be a name on the Hub and stays as it is.
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
    """A text of a recipe, which knows the folder it was written in."""

    folder: Path


def in_folder(value: Any, folder: Path) -> Any:
    """Return the same values of a recipe, with texts that know its folder."""
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
    """Return the full path of what a text names on this machine; anything else as it is."""
    if not isinstance(value, str) or value == BUILT_IN[0] or value.startswith(BUILT_IN[1]):
        return value
    return _found(value, _folders(value))


def full_function(value: Any) -> Any:
    """Return "file.py:function" with the full path of the file; anything else as it is."""
    place, colon, function = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{_found(place, _folders(value))}{colon}{function}" if place.endswith(".py") else value


def expanded(name: str) -> Path:
    """Return a path with the home folder that ``~`` or ``~user`` begins it with; of no known user it stays as it is."""
    return Path(os.path.expanduser(name))


def _folders(value: str) -> Sequence[Path]:
    return (value.folder, Path()) if isinstance(value, RecipeText) else (Path(),)


def _found(name: str, folders: Sequence[Path]) -> str:
    # A long text, such as a template, is no name of a file; asking the system about it would be an error.
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
