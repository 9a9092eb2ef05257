"""Labels that people give rollouts, in a file beside the record to which every change is appended."""

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple, get_args

from cavesson.errors import UserError
from cavesson.record.appended import AppendedFile, Stamp, now, path_of, stamp
from cavesson.record.read.reader import Run

Name = Literal["star", "rating", "tag", "note", "over"]
Key = tuple[int, int]
"""Step and sample of a rollout."""
Slot = tuple[str | int, ...]
"""What a later label takes the place of."""

BEST = 5
"""The highest rating; the lowest is 1."""


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
    """The labels of a run, in ``labels.jsonl`` beside its record.

    A line is a label of a rollout, or with ``"removed": true`` takes one away; the last line about the same thing
    counts. Several processes can write at once. Stars in ``stars.json``, which earlier versions wrote, count as well.
    """

    def __init__(self, record: Run) -> None:
        self._record = record
        self._file = AppendedFile(record, "labels.jsonl")
        self._lock = Lock()
        self._known: tuple[Any, dict[Key, dict[Slot, Label]]] = (None, {})

    def version(self) -> tuple[Stamp, ...]:
        """Return a value that changes with the labels, whoever changed them."""
        return stamp(self._stars()), stamp(self._file.path())

    def all(self) -> Labels:
        """Return all labels by rollout, including those of other processes."""
        with self._lock:
            version = self.version()
            if version != self._known[0]:
                found = _starred(self._stars())
                for line in self._file.lines(_read, "a label"):
                    _fold(found, *line)
                self._known = version, {key: labels for key, labels in found.items() if labels}
            return self._known[1]

    def of(self, key: Key) -> list[Label]:
        """Return the labels of a rollout."""
        return list(self.all().get(key, {}).values())

    def add(self, key: Key, label: Label, removed: bool = False) -> None:
        """Keep a label, or take it away; the time is that of now."""
        line = {"step": key[0], "sample": key[1], **label._asdict(), "time": now()}
        self.all()  # labels that cannot be read are not added to
        self._file.append(line | ({"removed": True} if removed else {}))

    def _stars(self) -> Path:
        return path_of(self._record, "stars.json")


def pairs(labels: Labels) -> list[tuple[Key, Key]]:
    """Return the chosen and the rejected rollout of each pair, once, ordered."""
    found = {
        (key, (key[0], int(label.value or 0)))
        for key, own in labels.items()
        for label in own.values()
        if label.name == "over"
    }
    return sorted(found)


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
