"""Ensure that only one process writes a run at a time, so that no attempt hides what another is recording."""

import atexit
import json
import os
import platform
import shlex
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

from filelock import BaseFileLock, FileLock, Timeout

from cavesson.errors import UserError, print_error
from cavesson.record.storage import Location, Storage, storage
from cavesson.text.masking import masked

WRITER = "writer.json"
"""Says which process writes the run; it is there as long as somebody does, or was killed while doing so."""
OWN = {WRITER, ".lock"}
"""What a run folder holds before anything of the run is written."""
_BEGUN = (".run.json.", f".{WRITER}.", ".writable-")
"""How names begin of what a process was killed over that had not begun a run yet."""

HEARTBEAT = 20.0
"""Seconds between two heartbeats of a process that records."""
SILENCE = 120.0
"""Seconds without a heartbeat after which a process on another machine counts as dead."""

FORGOTTEN = 3600.0
"""Seconds after which a silent process on another machine counts as dead, whatever the clocks of both say."""

_held: dict[str, "Lock"] = {}
"""The locks of this process by their files on this machine."""


def is_free(folder: Path) -> bool:
    """Whether a folder is absent, empty, or holds only what a process killed before it began a run leaves behind."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(p.name in OWN or p.name.startswith(_BEGUN) for p in folder.iterdir())


def written_elsewhere(files: Storage) -> bool:
    """Return whether a process of another machine writes the run, or did within the last hour and was killed."""
    owner, path = _owner(files), files.growing(WRITER)
    if owner is None or path is None or owner["host"] == platform.node():
        return False
    return time.time() - path.stat().st_mtime < FORGOTTEN


class LockedError(UserError):
    """Raised if another process is writing the run."""


class Lock:
    """The exclusive right to write a run, as a context manager.

    The lock has two parts. The first is a lock on a local file, which the operating system releases when the process
    ends, however it ends: holding it means that no other process on this machine is writing the run. The second is
    ``writer.json``, which names the process to users and to other machines, which cannot see each other's processes.
    A recording process writes heartbeats into it, so that a job restarted on another machine can take over from one
    that was killed; clocks of different machines are never compared. A ``writer.json`` without a heartbeat that
    another machine left behind must be removed by hand.

    Within one process, the newest lock wins: it takes the run over, and ``check`` raises an error for the older lock.

    Args:
        location: Run folder, or a URL.

    Raises:
        LockedError: Another process is writing the run; the message names it.
    """

    def __init__(self, location: Location) -> None:
        self._files = storage(location)
        self._process = os.getpid()
        self._me = _myself()
        self._released = Event()
        self._heart: Thread | None = None
        self._key = str(self._files.lock_file())
        before = _held.get(self._key)
        if before is not None and before._process != self._process:
            before = None  # copied by a fork: the parent process holds that lock
        self._file_lock: BaseFileLock = before._file_lock if before else _locked(self._files)
        try:
            if before:
                before.end_heartbeats()
                self._files.delete(WRITER)
            self._enter()
        except BaseException:
            _held.pop(self._key, None)
            self._file_lock.release()
            raise
        _held[self._key] = self
        atexit.register(self.release)

    @property
    def is_held(self) -> bool:
        """Whether this lock still holds the run."""
        return _held.get(self._key) is self and _owner(self._files) == self._me

    def check(self) -> None:
        """Check that the run still exists and that this lock still holds it.

        Raises:
            UserError: The run was deleted, or another lock or process has taken it over.
        """
        if _held.get(self._key) is not self:
            raise UserError(f"{self._files.root} is now recorded by another recorder of this process")
        owner = _owner(self._files)
        if owner == self._me:
            return
        if owner is not None:
            raise UserError(f"{self._files.root} is now written by {_named(owner)}: this process stops")
        # Without run.json the run no longer exists; writer.json alone may have been removed by mistake.
        if not self._files.exists("run.json") or not self._files.create(WRITER, json.dumps(self._me).encode()):
            raise UserError(f"{self._files.root} was deleted or moved while it was being written")

    def keep_alive(self) -> None:
        """Write heartbeats from a background thread until the lock is released."""
        if self._heart is None:
            self._heart = Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heart.start()

    def end_heartbeats(self) -> None:
        """Stop the heartbeats; the lock is still held. A late one would write into a folder that is being removed."""
        self._released.set()
        if self._heart is not None:
            self._heart.join()

    def release(self, reachable: bool = True) -> None:
        """Release the lock so that others can write the run; a second call does nothing.

        If the storage is not ``reachable``, ``writer.json`` stays there, without heartbeats.
        """
        atexit.unregister(self.release)
        if self._process != os.getpid():
            return
        self._released.set()
        if reachable:
            self.end_heartbeats()
        if _held.get(self._key) is not self:
            return
        del _held[self._key]
        try:
            if reachable and _owner(self._files) == self._me:
                self._files.delete(WRITER)
        finally:
            self._file_lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _enter(self) -> None:
        content = json.dumps(self._me).encode()
        while not self._files.create(WRITER, content):
            owner = _owner(self._files)
            if owner is not None and owner["host"] != self._me["host"]:
                _wait_for_heartbeat(self._files, owner)
            self._files.delete(WRITER)  # left by a process that was killed, perhaps while writing it

    def _beat(self) -> None:
        for beats in count():
            # Unreachable storage raises whatever its library raises; `check` reports errors that persist.
            with suppress(Exception):
                if _owner(self._files) == self._me:
                    with self._files.writing(WRITER) as file:
                        file.write(json.dumps(self._me | {"heartbeats": beats}).encode())
            if self._released.wait(HEARTBEAT):
                return


def _wait_for_heartbeat(files: Storage, owner: dict[str, Any]) -> None:
    """Wait until the owner, on another machine, is known to be dead or has released the lock.

    Raises:
        LockedError: The owner is alive, or its state cannot be determined.
    """
    seen = _content(files)
    if "heartbeats" not in seen:
        raise LockedError(
            f"{files.root} is held by {_named(owner)}; if that process has ended, "
            f"remove {files.path(WRITER)} and try again"
        )
    held = f"{files.root} is held by {_named(owner)}"
    print_error(f"cavesson: {held}; waiting up to {SILENCE:.0f} s to see whether it still runs")
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(SILENCE / 100)
        now = _content(files)
        if not now:
            return
        if now != seen:
            raise LockedError(f"{files.root} is being written by {_named(owner)}: stop it, or wait until it has ended")


def _locked(files: Storage) -> BaseFileLock:
    """Acquire and return the local file lock of a run."""
    file_lock = FileLock(files.lock_file(), blocking=False, thread_local=False)
    try:
        file_lock.acquire()
    except Timeout:
        owner = _owner(files)
        by = "another process of this machine" if owner is None else _named(owner)
        raise LockedError(f"{files.root} is being written by {by}: stop it, or wait until it has ended") from None
    except OSError as error:
        # File systems without locks, such as NFS without its lock service, or another account's lock in /tmp.
        raise UserError(
            f"{file_lock.lock_file} cannot be locked, so a second process could write to {files.root}: {error.strerror}"
        ) from error
    return file_lock


def _myself() -> dict[str, Any]:
    """Return the entry for this process in ``writer.json``."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now(UTC).isoformat(),
        "command": masked(shlex.join(command))[:200],
    }


def _content(files: Storage) -> dict[str, Any]:
    """Return the content of ``writer.json``; empty if the file is absent or was left incomplete by a dead process."""
    try:
        content: dict[str, Any] = json.loads(files.read(WRITER))
    except (FileNotFoundError, ValueError):
        return {}
    return content


def _owner(files: Storage) -> dict[str, Any] | None:
    """Return the process that ``writer.json`` names, or None if it names none."""
    content = _content(files)
    content.pop("heartbeats", None)
    return content or None


def _named(owner: dict[str, Any]) -> str:
    since = datetime.fromisoformat(owner["since"])
    return f"process {owner['pid']} on {owner['host']} since {since:%Y-%m-%d %H:%M:%S} UTC ({owner['command']})"
