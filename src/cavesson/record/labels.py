"""Labels that people give rollouts, in a file beside the record to which every change is appended."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, get_args

from filelock import FileLock, Timeout

from cavesson.errors import UserError
from cavesson.record.read.index_folder import index_folder, local_folder
from cavesson.record.read.reader import Run

Name = Literal["star", "rating", "tag", "note", "over"]
Key = tuple[int, int]
"""Step and sample of a rollout."""
Slot = tuple[str | int, ...]
"""What a later label takes the place of."""

BEST = 5
"""The highest rating; the lowest is 1."""
WAIT = 10
"""Seconds to wait for another board that labels rollouts of the same run."""


class Label(NamedTuple):
    """What somebody says of a rollout. A star has no value, a rating is from 1 to 5, tags and notes are texts.

    ``over`` prefers the rollout to the one of the same step whose sample is the value.
    """

    name: Name
    value: str | int | None = None
    author: str = ""
    time: str | None = None
    """ISO 8601, in UTC"""

    @property
    def slot(self) -> Slot:
        """Ratings, notes and preferences are their author's; stars and tags are shared by all."""
        if self.name == "star":
            return (self.name,)
        if self.name == "tag":
            return (self.name, str(self.value))
        return (self.name, self.author) if self.name != "over" else (self.name, self.author, int(self.value or 0))


Labels = Mapping[Key, Mapping[Slot, Label]]


class LabelFile:
    """The labels of a run, in ``labels.jsonl`` in the folder of the record, or of its index if that is not writable.

    A line is a label of a rollout, or with ``"removed": true`` takes one away; the last line about the same thing
    counts. Several processes can write at once. Stars in ``stars.json``, which earlier versions wrote, count as well.
    """

    def __init__(self, record: Run) -> None:
        self._record = record
        self._lock = Lock()
        self._known: tuple[Any, dict[Key, dict[Slot, Label]]] = (None, {})

    def path(self, name: str = "labels.jsonl") -> Path:
        """Return where a file is, which can change because a run may start after its board.

        Raises:
            UserError: A link there leads out of the folder.
        """
        folder = local_folder(self._record)
        if folder is None or not os.access(folder, os.W_OK):
            return index_folder(self._record) / name
        return Path(self._record.storage.path(name))

    def version(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that changes with the labels, whoever changed them."""
        return tuple(map(_stamp, self._sources()))

    def all(self) -> Labels:
        """Return all labels by rollout, including those of other processes."""
        with self._lock:
            version = self.version()
            if version != self._known[0]:
                old, new = self._sources()
                found = _starred(old)
                for line in _lines(new):
                    _fold(found, *line)
                self._known = version, {key: labels for key, labels in found.items() if labels}
            return self._known[1]

    def of(self, key: Key) -> list[Label]:
        """Return the labels of a rollout."""
        return list(self.all().get(key, {}).values())

    def add(self, key: Key, label: Label, removed: bool = False) -> None:
        """Keep a label, or take it away; the time is that of now."""
        line = {"step": key[0], "sample": key[1], **label._asdict(), "time": _now()}
        line |= {"removed": True} if removed else {}
        self.all()  # labels that cannot be read are not added to
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

    def _sources(self) -> tuple[Path, Path]:
        return self.path("stars.json"), self.path()

    @contextmanager
    def _alone(self) -> Iterator[Path]:
        """Yield the path of the file, which no other thread, process or board changes in the meantime."""
        path = self.path()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.path(".labels.lock"), WAIT, poll_interval=0.01):
                yield path
        except Timeout:
            raise UserError(f"another process has been changing {path} for {WAIT} s; try again") from None


def pairs(labels: Labels) -> list[tuple[Key, Key]]:
    """Return the chosen and the rejected rollout of each pair, once, ordered."""
    found = {
        (key, (key[0], int(label.value or 0)))
        for key, own in labels.items()
        for label in own.values()
        if label.name == "over"
    }
    return sorted(found)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _starred(path: Path) -> dict[Key, dict[Slot, Label]]:
    if not path.is_file():
        return {}
    found: dict[Key, dict[Slot, Label]] = {}
    try:
        for star in json.loads(path.read_bytes())["stars"]:
            key = int(star["step"]), int(star["sample"])
            _fold(found, key, Label("star"), False)
            if note := str(star["note"]):
                _fold(found, key, Label("note", note), False)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UserError(f"{path} is not a file of stars; fix it or move it away") from None
    return found


def _lines(path: Path) -> Iterator[tuple[Key, Label, bool]]:
    """Yield the rollout, the label, and whether it is taken away, of each complete line."""
    if not path.is_file():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            yield _read(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"line {number} of {path} is not a label; fix it or move the file away") from None


def _read(line: dict[str, Any]) -> tuple[Key, Label, bool]:
    name: Any = line["name"]
    wanted: Any = {"star": type(None), "rating": int, "over": int}.get(name, str)
    if name not in get_args(Name) or type(line["value"]) is not wanted:
        raise ValueError(name)
    if name == "rating" and not 1 <= line["value"] <= BEST:
        raise ValueError(name)
    time = None if line["time"] is None else str(line["time"])
    key = int(line["step"]), int(line["sample"])
    return key, Label(name, line["value"], str(line["author"]), time), line.get("removed") is True


def _fold(found: dict[Key, dict[Slot, Label]], key: Key, label: Label, removed: bool) -> None:
    """Apply one line to the labels that the lines before it leave."""
    own = found.setdefault(key, {})
    own.pop(label.slot, None)
    if removed:
        return
    own[label.slot] = label
    if label.name == "over":
        # Who prefers the one now does not prefer the other any more.
        found.get((key[0], int(label.value or 0)), {}).pop(("over", label.author, key[1]), None)
