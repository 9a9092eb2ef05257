"""Lines that several processes append to a file beside a record, such as labels and notes."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from cavesson.errors import UserError
from cavesson.record.read.index_folder import index_folder, local_folder
from cavesson.record.read.reader import Run

WAIT = 10
"""Seconds to wait for another process that writes to the same file."""
Stamp = tuple[int, int, int] | None
"""A value that changes with a file; None if it is missing."""
T = TypeVar("T")


class AppendedFile:
    """A file of JSON lines in the folder of the record, or of its index if that is not writable."""

    def __init__(self, record: Run, name: str) -> None:
        self._record, self._name = record, name

    def path(self) -> Path:
        """Return where it is, which can change because a run may start after its board.

        Raises:
            UserError: A link there leads out of the folder.
        """
        return path_of(self._record, self._name)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line; it is on the disk when this returns."""
        with self._alone() as path:
            data = path.read_bytes() if path.exists() else b""
            with path.open("r+b" if data else "wb") as file:
                # A process that was stopped may have left part of a line, which nobody was told to be kept.
                file.seek(data.rfind(b"\n") + 1)
                file.truncate()
                # Escaped as ASCII, so that a lone surrogate in a note is preserved.
                file.write(json.dumps(line).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())

    def lines(self, read: Callable[[dict[str, Any]], T], what: str) -> Iterator[T]:
        """Yield what ``read`` returns of each complete line.

        Raises:
            UserError: A line is not ``what``: no JSON, or ``read`` raised a ValueError, KeyError or TypeError.
        """
        path = self.path()
        if not path.is_file():
            return
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
            try:
                yield read(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(f"line {number} of {path} is not {what}; fix it or move the file away") from None

    @contextmanager
    def _alone(self) -> Iterator[Path]:
        """Yield the path of the file, which no other thread, process or board changes in the meantime."""
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(path_of(self._record, f".{path.stem}.lock"), WAIT, poll_interval=0.01):
                yield path
        except Timeout:
            raise UserError(f"another process has been changing {path} for {WAIT} s; try again") from None


def path_of(record: Run, name: str) -> Path:
    """Return where a file beside a record is: in its folder, or in that of its index if that is not writable."""
    folder = local_folder(record)
    if folder is None or not os.access(folder, os.W_OK):
        return index_folder(record) / name
    return Path(record.storage.path(name))


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def stamp(path: Path) -> Stamp:
    """Return a value that changes with a file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
