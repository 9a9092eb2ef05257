"""Stars and notes on rollouts, kept beside the record in one JSON file."""

import json
import os
import threading
from pathlib import Path

from dressage.errors import UserError
from dressage.index.folder import local_folder
from dressage.record import Run
from dressage.record.files import replacing


class Stars:
    """Notes by (step, sample); a star without words is an empty note.

    Args:
        record: The opened record; its folder holds ``stars.json`` where it can be written.
        fallback: Folder that does otherwise.
    """

    def __init__(self, record: Run, fallback: Path) -> None:
        self._folder = local_folder(record)
        self._fallback = fallback
        self._lock = threading.Lock()

    @property
    def path(self) -> Path:
        """Where they are; a run may begin after its board."""
        writable = self._folder is not None and os.access(self._folder, os.W_OK)
        return (self._folder if self._folder is not None and writable else self._fallback) / "stars.json"

    def all(self) -> dict[tuple[int, int], str]:
        """Returns every note, those that another board wrote included."""
        if not self.path.is_file():
            return {}
        try:
            return {
                (int(s["step"]), int(s["sample"])): str(s["note"]) for s in json.loads(self.path.read_bytes())["stars"]
            }
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{self.path} holds no stars; mend it or move it away") from None

    def put(self, step: int, sample: int, note: str) -> None:
        """Stars a rollout, or changes its note."""
        with self._lock:
            self._write(self.all() | {(step, sample): note})

    def remove(self, step: int, sample: int) -> bool:
        """Takes a star away; returns whether there was one."""
        with self._lock:
            stars = self.all()
            found = stars.pop((step, sample), None) is not None
            if found:
                self._write(stars)
            return found

    def _write(self, stars: dict[tuple[int, int], str]) -> None:
        entries = [{"step": step, "sample": sample, "note": note} for (step, sample), note in sorted(stars.items())]
        # Plain ASCII: half a surrogate pair in a note is kept as it is.
        with replacing(self.path) as file:
            file.write(json.dumps({"stars": entries}, indent=1).encode())
