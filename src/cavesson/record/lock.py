"""Who writes a run: one process at a time, so that no attempt hides what another one is recording."""

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

from cavesson.errors import UserError
from cavesson.record.storage import Place, Storage, storage

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

_held: dict[str, "Lock"] = {}
"""The locks of this process by their files on this machine."""


def is_free(folder: Path) -> bool:
    """Whether nothing is in a folder, or no more than a process leaves that was killed before it began a run."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(p.name in OWN or p.name.startswith(_BEGUN) for p in folder.iterdir())


class LockedError(UserError):
    """Another process writes the run."""


class Lock:
    """The right to write a run, which one process has at a time; a context manager.

    Two things make it. A lock on a file of this machine ends with the process, however it ends: who can take it knows
    that nobody on this machine writes the run. ``writer.json`` names the process to people and to other machines, which
    know nothing of each other's processes. A process that records writes a heartbeat into it, so that a job that is
    started again on another machine can take over from one that was killed; no two clocks are compared. Without a
    heartbeat, what another machine has left must be removed by hand.

    Within one process the latest lock counts: a run is recorded by whoever asked last, and who asked before is told
    by ``check``.

    Args:
        place: Run folder, or a URL.

    Raises:
        LockedError: Another process writes the run; the message names it.
    """

    def __init__(self, place: Place) -> None:
        self._files = storage(place)
        self._process = os.getpid()
        self._me = _myself()
        self._released = Event()
        self._heart: Thread | None = None
        self._key = str(self._files.lock_file())
        before = _held.get(self._key)
        if before is not None and before._process != self._process:
            before = None  # what a fork has copied is held by the other process
        self._file_lock: BaseFileLock = before._file_lock if before else _locked(self._files)
        try:
            if before:
                before._end_heartbeats()
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
        """Whether the run is there and still this lock's to write."""
        return _held.get(self._key) is self and _owner(self._files) == self._me

    def check(self) -> None:
        """Makes sure that the run is still there and still this lock's to write.

        Raises:
            UserError: The run was deleted, or somebody else writes it now.
        """
        if _held.get(self._key) is not self:
            raise UserError(f"{self._files.root} is recorded by something else of this process, which began later")
        owner = _owner(self._files)
        if owner == self._me:
            return
        if owner is not None:
            raise UserError(f"{self._files.root} is written by {_named(owner)} now: this process stops")
        # Without run.json there is no run any more; writer.json alone may have been removed by somebody in error.
        if not self._files.exists("run.json") or not self._files.create(WRITER, json.dumps(self._me).encode()):
            raise UserError(f"{self._files.root} was deleted or moved while it was being written")

    def keep_alive(self) -> None:
        """Writes heartbeats from another thread until the lock is released."""
        if self._heart is None:
            self._heart = Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heart.start()

    def release(self) -> None:
        """Lets others write the run; a second call does nothing."""
        atexit.unregister(self.release)
        if self._process != os.getpid():
            return
        self._end_heartbeats()
        if _held.get(self._key) is not self:
            return
        del _held[self._key]
        try:
            if _owner(self._files) == self._me:
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
            self._files.delete(WRITER)  # of a process that was killed, perhaps while writing it

    def _end_heartbeats(self) -> None:
        self._released.set()
        if self._heart is not None:
            self._heart.join()  # a heartbeat must not bring back what is deleted or replaced next

    def _beat(self) -> None:
        for beats in count():
            # Storage that cannot be reached raises whatever its library raises. `check` reports what does not pass.
            with suppress(Exception):
                if _owner(self._files) == self._me:
                    with self._files.writing(WRITER) as file:
                        file.write(json.dumps(self._me | {"heartbeats": beats}).encode())
            if self._released.wait(HEARTBEAT):
                return


def _wait_for_heartbeat(files: Storage, owner: dict[str, Any]) -> None:
    """Returns once the owner, on another machine, is known to be dead or to have released the lock.

    Raises:
        LockedError: It lives, or nobody can tell.
    """
    seen = _content(files)
    if "heartbeats" not in seen:
        raise LockedError(
            f"{files.root} is held by {_named(owner)}; if that process has ended, "
            f"remove {files.path(WRITER)} and try again"
        )
    held = f"{files.root} is held by {_named(owner)}"
    print(f"cavesson: {held}; waiting up to {SILENCE:.0f} s to see whether it still runs", file=sys.stderr)
    deadline = time.monotonic() + SILENCE
    while time.monotonic() < deadline:
        time.sleep(SILENCE / 100)
        now = _content(files)
        if not now:
            return
        if now != seen:
            raise LockedError(f"{files.root} is being written by {_named(owner)}: stop it, or wait until it has ended")


def _locked(files: Storage) -> BaseFileLock:
    """Returns the file lock of a run on this machine, taken."""
    file_lock = FileLock(files.lock_file(), blocking=False, thread_local=False)
    try:
        file_lock.acquire()
    except Timeout:
        owner = _owner(files)
        by = "another process of this machine" if owner is None else _named(owner)
        raise LockedError(f"{files.root} is being written by {by}: stop it, or wait until it has ended") from None
    except OSError as error:
        # File systems without locks, such as NFS without its lock service, and the lock of another account in /tmp.
        raise UserError(
            f"{file_lock.lock_file} cannot be locked, so nothing would keep a second process from {files.root}: "
            f"{error.strerror}"
        ) from error
    return file_lock


def _myself() -> dict[str, Any]:
    """Returns what ``writer.json`` says of this process."""
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "pid": os.getpid(),
        "host": platform.node(),
        "since": datetime.now(UTC).isoformat(),
        "command": shlex.join(command)[:200],
    }


def _content(files: Storage) -> dict[str, Any]:
    """Returns what ``writer.json`` says; nothing if it is not there, or was being written by a process that died."""
    try:
        content: dict[str, Any] = json.loads(files.read(WRITER))
    except (FileNotFoundError, ValueError):
        return {}
    return content


def _owner(files: Storage) -> dict[str, Any] | None:
    """Returns the process that ``writer.json`` names, if it names one."""
    content = _content(files)
    content.pop("heartbeats", None)
    return content or None


def _named(owner: dict[str, Any]) -> str:
    since = datetime.fromisoformat(owner["since"])
    return f"process {owner['pid']} on {owner['host']} since {since:%Y-%m-%d %H:%M:%S} UTC ({owner['command']})"
