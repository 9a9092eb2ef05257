"""Whether something can be written at a path, found out before the work whose result goes there."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from cavesson.errors import UserError


def check_writable(path: Path) -> None:
    """Makes sure that a file or folder can be made at a path; what is tried for that is gone afterwards.

    Raises:
        UserError: The path lies below a file or a link to nothing, is too long, or nothing can be written there.
    """
    path = path.absolute()
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if there.is_symlink() and not os.path.exists(there):
        raise UserError(f"{path} cannot be written: {there} is a link to {os.readlink(there)}, which does not exist")
    if there != path and not there.is_dir():
        raise UserError(f"{path} cannot be written: {there} is a file")
    folder = there if there.is_dir() else there.parent
    try:
        # Permission bits say nothing to root and nothing of the file system: trying does.
        with TemporaryDirectory(dir=folder, prefix=".writable-") as tried:
            (Path(tried) / path.relative_to(folder)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def check_new(path: Path, way_out: str = "choose another --out") -> None:
    """As ``check_writable``, and raises UserError too if there is something at the path already."""
    check_writable(path)
    if path.exists():
        raise UserError(f"{path} exists already; {way_out}")


def check_file(path: Path) -> None:
    """As ``check_writable``, and raises UserError too if the path is a folder's."""
    check_writable(path)
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder")
