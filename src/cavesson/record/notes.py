"""Notes that people write on steps and curves of a run, in a file beside the record that every change is added to."""

from typing import Any, NamedTuple

from cavesson.record.appended import AppendedFile, now
from cavesson.record.read.reader import Run


class Note(NamedTuple):
    """What somebody writes on a step, or on a curve at a step. Of one author, a later note there takes its place."""

    step: int
    metric: str | None
    """Name of a metric or of a column of the rollouts, as in a request for curves; None: the whole step."""
    text: str
    author: str = ""
    time: str = ""
    """ISO 8601, in UTC"""


class NoteFile:
    """The notes of a run, in ``notes.jsonl`` beside its record.

    A line is a note, and one with an empty text takes away what its author wrote there; the last line of an author
    about the same place counts. Several processes can write at once.
    """

    def __init__(self, record: Run) -> None:
        self._file = AppendedFile(record, "notes.jsonl")

    def all(self) -> list[Note]:
        """Return all notes, by step, and of a step in the order of their time."""
        found: dict[tuple[int, str | None, str], Note] = {}
        for note in self._file.lines(_read, "a note"):
            place = (note.step, note.metric, note.author)
            found.pop(place, None)
            if note.text:
                found[place] = note
        return sorted(found.values(), key=lambda note: note.step)

    def write(self, step: int, metric: str | None, text: str, author: str = "") -> None:
        """Keep a note, or with an empty text take it away; the time is that of now."""
        self.all()  # notes that cannot be read are not added to
        self._file.append(Note(step, metric, text, author, now())._asdict())


def _read(line: dict[str, Any]) -> Note:
    metric = line["metric"]
    return Note(
        int(line["step"]),
        None if metric is None else str(metric),
        str(line["text"]),
        str(line["author"]),
        str(line["time"]),
    )
