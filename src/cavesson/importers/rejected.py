"""Keep records that could not be read in RUN/rejected.jsonl, so that nothing is lost."""

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

from cavesson.importers.reading import Record

QUOTED = 5
"""How many broken records a report quotes."""


class Rejected:
    """Counts broken records and keeps each with its file, line and reason.

    A line of ``rejected.jsonl`` has ``file``, ``line`` (or row), ``offset`` and ``size`` in bytes, ``reason``, and the
    line itself: as ``text``, or as ``base64`` if its bytes are not UTF-8. A row of a table is in ``row``. A line that
    is too long to be held in memory, or a row that JSON cannot represent, is only in its source file.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rejected.jsonl"
        self.count = 0
        self.quotes: list[str] = []

    def add(self, path: Path, record: Record | None, reason: str) -> None:
        """Keep a record, or note a file that cannot be read at all."""
        kept: dict[str, Any] = {"file": str(path)}
        where = str(path)
        if record is not None:
            kept |= {"line": record.line, "offset": record.offset, "size": record.size}
            where += f", {'row' if isinstance(record.content, dict) else 'line'} {record.line}"
        kept |= {"reason": reason} | _content(record)
        # ASCII ensures that every reader splits lines the same way and that no control character reaches a terminal.
        with self._path.open("a", encoding="ascii", newline="\n") as file:
            file.write(_line(kept) + "\n")
        self.count += 1
        if len(self.quotes) < QUOTED:
            self.quotes.append(f"{where}: {reason}")


def _line(kept: dict[str, Any]) -> str:
    try:
        return json.dumps(kept, default=str)
    except (RecursionError, TypeError):  # a row that is nested too deeply, or has keys that JSON does not allow
        return json.dumps({name: value for name, value in kept.items() if name != "row"})


def _content(record: Record | None) -> dict[str, Any]:
    if record is None or record.content is None:
        return {}
    if isinstance(record.content, dict):
        return {"row": record.content}
    try:
        return {"text": record.content.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(record.content).decode()}
