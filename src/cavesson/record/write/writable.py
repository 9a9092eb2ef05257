"""Check that a path is writable before starting the work whose result is written there."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from cavesson.errors import UserError


def check_writable(path: Path) -> None:
    """Check that a file or folder can be created at a path, by trying; nothing created for the test remains.

    Raises:
        UserError: The path lies below a file or a broken link, is too long, or is not writable.
    """
    path = path.absolute()
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if there.is_symlink() and not os.path.exists(there):
        raise UserError(f"{path} cannot be written: {there} is a link to {os.readlink(there)}, which does not exist")
    if there != path and not there.is_dir():
        raise UserError(f"{path} cannot be written: {there} is a file")
    folder = there if there.is_dir() else there.parent
    try:
        # Permission bits do not restrict root and do not describe the file system, so try it.
        with TemporaryDirectory(dir=folder, prefix=".writable-") as tried:
            (Path(tried) / path.relative_to(folder)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def check_new(path: Path, way_out: str = "choose another --out") -> None:
    """Like ``check_writable``, but also raise UserError if the path exists."""
    check_writable(path)
    if path.exists():
        raise UserError(f"{path} exists already; {way_out}")


def check_file(path: Path) -> None:
    """Like ``check_writable``, but also raise UserError if the path is a folder."""
    check_writable(path)
    if path.is_dir():
        raise UserError(f"{path} cannot be written: it is a folder")
