"""Stars and notes on rollouts, stored next to the record in a JSON file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from cavesson.errors import UserError
from cavesson.record import Run
from cavesson.record.files import write_text
from cavesson.record.read.index_folder import local_folder

WAIT = 10
"""Seconds to wait for another board that changes the notes of the same run."""


class Stars:
    """Notes by (step, sample); a star without a note has an empty one.

    ``stars.json`` is in the folder of the record if that is writable, else in the folder ``fallback``.
    """

    def __init__(self, record: Run, fallback: Path) -> None:
        self._record = record
        self._fallback = fallback

    @property
    def path(self) -> Path:
        """The path of the file, which can change because a run may start after its board."""
        return self._path("stars.json")

    def _path(self, name: str) -> Path:
        """Return the path of a file beside the record; raise UserError if a link there leads out of the folder."""
        folder = local_folder(self._record)
        if folder is None or not os.access(folder, os.W_OK):
            return self._fallback / name
        return Path(self._record.storage.path(name))

    def all(self) -> dict[tuple[int, int], str]:
        """Return all notes, including those written by another board."""
        if not self.path.is_file():
            return {}
        try:
            return {
                (int(s["step"]), int(s["sample"])): str(s["note"]) for s in json.loads(self.path.read_bytes())["stars"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{self.path} is not a file of stars; fix it or move it away") from None

    def put(self, step: int, sample: int, note: str) -> None:
        """Star a rollout, or change its note."""
        with self._changing() as stars:
            stars[step, sample] = note

    def remove(self, step: int, sample: int) -> bool:
        """Remove a star; return whether there was one."""
        with self._changing() as stars:
            return stars.pop((step, sample), None) is not None

    @contextmanager
    def _changing(self) -> Iterator[dict[tuple[int, int], str]]:
        """Yield all notes and write them back; no other thread, process or board can change them in the meantime."""
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self._path(".stars.lock"), WAIT, poll_interval=0.01):
                stars = self.all()
                before = stars.copy()
                yield stars
                if stars != before:
                    self._write(path, stars)
        except Timeout:
            raise UserError(f"another process has been changing {path} for {WAIT} s; try again") from None

    def _write(self, path: Path, stars: dict[tuple[int, int], str]) -> None:
        entries = [{"step": step, "sample": sample, "note": note} for (step, sample), note in sorted(stars.items())]
        # Escaped as ASCII, so that a lone surrogate in a note is preserved.
        write_text(path, json.dumps({"stars": entries}, indent=1))
