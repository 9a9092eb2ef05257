"""Temporary folders for what is large: what a killed process leaves there is removed by the next one."""

import os
import shutil
import sys
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Self

if sys.platform != "win32":
    import fcntl


class Scratch:
    """A temporary folder, named after its purpose, that is removed when its block or object ends, at the latest with
    the process.
    """

    def __init__(self, kind: str) -> None:
        prefix = f"cavesson-{kind}-"
        for left_over in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            if (lock := _locked(str(left_over))) is not None:
                _remove(str(left_over), lock)
        self.name = tempfile.mkdtemp(prefix=f".{prefix}")
        self._lock = _locked(self.name)
        if self._lock is not None:  # from here on others can find it
            hidden = Path(self.name)
            self.name = str(hidden.rename(hidden.with_name(hidden.name.removeprefix("."))))
        self._remove = weakref.finalize(self, _remove, self.name, self._lock)

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()


def _remove(name: str, lock: int | None) -> None:
    shutil.rmtree(name, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _locked(name: str) -> int | None:
    """Return a handle that holds a lock on a folder without waiting, or None if another one does, or nobody can."""
    if sys.platform == "win32":
        return None
    with suppress(OSError):
        lock = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
        except OSError:
            pass  # it lives, or its file system has no locks
        os.close(lock)
    return None
