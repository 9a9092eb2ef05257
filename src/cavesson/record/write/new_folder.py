"""Write a local folder atomically."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cavesson.errors import UserError
from cavesson.record.write.lock import OWN, Lock, is_free
from cavesson.record.write.writable import check_writable


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a hidden folder beside ``path`` that is renamed to ``path`` at the end, or removed if anything fails.

    The next call removes what a killed process left behind.

    Raises:
        UserError: ``path`` exists and is not an empty folder, or another process is already writing it.
    """
    check_writable(path)
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.unfinished")
    check_free(path)
    with Lock(temporary):
        try:
            check_free(path)  # the previous holder of the lock may have just written it
            _clear(temporary, OWN)
            yield temporary
            _rename(temporary, path)
        except BaseException:
            shutil.rmtree(temporary)
            raise


def _rename(temporary: Path, path: Path) -> None:
    if path.exists():
        with Lock(path):  # the folder of a run that is about to begin holds only its lock
            check_free(path)
            _clear(path, set())
            _take_name(temporary, path)
    else:
        _take_name(temporary, path)


def _take_name(temporary: Path, path: Path) -> None:
    # The lock is held until the rename is done: the next holder then finds that the path exists.
    for name in OWN:
        (temporary / name).unlink(missing_ok=True)
    try:
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


def check_free(path: Path) -> None:
    """Raise UserError if ``path`` exists and is not an empty folder."""
    if not is_free(path):
        raise UserError(f"{path} exists and is not an empty folder: choose a new one, or remove it first")


def _clear(folder: Path, kept: set[str]) -> None:
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink():
            shutil.rmtree(child)
        elif child.name not in kept:
            child.unlink()
