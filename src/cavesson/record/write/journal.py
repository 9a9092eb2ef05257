"""Keep calls of a recorder on disk until they are in a segment, so that a killed process loses none of them.

A call is one frame: the lengths and the checksum of two parts, a JSON object, and the bytes of the arrays in it. A
frame that a kill has cut off, that a power failure has damaged, or that no recorder has written, ends the journal.
"""

import errno
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from cavesson.errors import UserError, first_line, print_error
from cavesson.record.former_names import FORMER
from cavesson.record.storage import Storage
from cavesson.record.write.writing import Call, Metrics, Rollouts

if sys.platform != "win32":
    import fcntl

_HEADER = struct.Struct("<QQI")


def journal_name(attempt: int, rank: int) -> str:
    return f"record/.journal-{attempt:04d}-{rank:04d}"


class Journal:
    """The journal of one recorder; the operating system unlocks it when the process ends, however it ends."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = 0

    @classmethod
    def opened(cls, files: Storage, attempt: int, rank: int) -> Self | None:
        """Open the journal of a recorder; None if the storage has no files that can grow and be locked."""
        path = files.growing(journal_name(attempt, rank))
        if path is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        if not _locked(file):
            file.close()
            return None
        return cls(file)

    @property
    def is_there(self) -> bool:
        """Whether the file is still in a folder, which it is not once the run has been deleted."""
        return os.fstat(self._file.fileno()).st_nlink > 0

    def add(self, call: Call) -> None:
        frame = _frame(call)
        try:
            if self._file.write(frame) < len(frame):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._cut(self.size)  # what follows must be readable
            raise
        self.size += len(frame)

    def clear(self) -> None:
        """Forget all calls, which are in a segment now."""
        self._cut(0)

    def _cut(self, size: int) -> None:
        self._file.truncate(size)
        self.size = size

    def close(self, keep: bool) -> None:
        """Close the journal; ``keep`` it if its calls could not be written."""
        if not keep:
            Path(self._file.name).unlink(missing_ok=True)
        self._file.close()


def _locked(file: IO[bytes]) -> bool:
    """Lock a journal without waiting; False if another process has it, or if the file system has no locks."""
    if sys.platform == "win32":
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def abandoned(path: Path) -> Iterator[list[Call]]:
    """Yield the calls in the journal of a process that has ended, and remove the journal when the block has succeeded.

    There are none if the process still runs, or if the journal may not be changed. If a part of it is damaged, or the
    block cannot use it, the journal is kept under another name.
    """
    try:
        file = path.open("r+b")
    except OSError:
        yield []
        return
    with file:
        if not os.fstat(file.fileno()).st_size or not _locked(file):
            yield []
            return
        calls, is_damaged = _read(file)
        why = "its end is damaged, as by a power failure" if is_damaged else None
        try:
            yield calls
        except (OSError, UserError):
            raise
        except Exception as error:  # whatever a frame may have that no recorder would have taken
            why = f"it does not fit the record ({type(error).__name__}: {first_line(error)})"
        if why is None:
            path.unlink(missing_ok=True)
            return
        kept = path.replace(path.with_name(f"{path.name}.damaged"))
        print_error(f"cavesson: the journal of {path.parent.parent} was not added as a whole: {why}; see {kept}")


def _frame(call: Call) -> bytes:
    arrays: dict[str, Any] = {}
    if isinstance(call, Rollouts):
        arrays = call.tokens
        texts = {name: array.tolist() for name, array in arrays.items() if array.dtype.hasobject}
        arrays = {name: array for name, array in arrays.items() if name not in texts}
        head = {"step": call.step, "rows": call.rows, "measured": call.measured, "texts": texts, "turns": call.turns}
    else:
        head = {"step": call.step, "metrics": call.values}
    head["arrays"] = [(name, array.dtype.str, len(array)) for name, array in arrays.items()]
    text = json.dumps(head, default=lambda value: value.tolist()).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    return _HEADER.pack(len(text), len(body), zlib.crc32(body, zlib.crc32(text))) + text + body


def _read(file: IO[bytes]) -> tuple[list[Call], bool]:
    """Return the calls in a journal up to the first damaged frame, and whether there is one."""
    end, calls = os.fstat(file.fileno()).st_size, list[Call]()
    while file.tell() + _HEADER.size <= end:
        size, more, checksum = _HEADER.unpack(file.read(_HEADER.size))
        if file.tell() + size + more > end:
            break
        text, body = file.read(size), file.read(more)
        if not size or zlib.crc32(body, zlib.crc32(text)) != checksum:
            return calls, True
        try:
            calls.append(_call(json.loads(text), body))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return calls, True
    return calls, False


def _call(head: Any, body: bytes) -> Call:
    """Return the call of a frame; raise what the conversions raise if a recorder would not have taken it."""
    start, arrays = 0, dict[str, Any]()
    for name, kind, count in head["arrays"]:
        if count < 0 or np.dtype(kind).kind not in "biufU":
            raise ValueError(f"{name} is not a column")
        arrays[name] = np.frombuffer(body, kind, count, start)
        start += arrays[name].nbytes
    if type(head["step"]) is not int or not 0 <= head["step"] < 2**31:
        raise ValueError("the step is not a number of the record")
    if "metrics" in head:
        return Metrics(head["step"], {name: float(value) for name, value in head["metrics"].items()})
    arrays = {FORMER.get(name, name): array for name, array in arrays.items()}
    tokens = arrays | {name: np.array(values, np.object_) for name, values in head["texts"].items()}
    rows, lengths = len(head["rows"]["sample"]), {len(column) for column in tokens.values()}
    for name, limit in (("row", rows), ("position", 2**31)):
        column = tokens[name]
        if column.dtype.kind not in "iu" or (len(column) and not 0 <= column.min() <= column.max() < limit):
            raise ValueError(f"{name} does not say where a token is")
    if len(lengths) > 1 or any(len(values) != rows for values in head["rows"].values()):
        raise ValueError("columns differ in length")
    return Rollouts(head["step"], head["rows"], tokens, bool(head["measured"]), _turns(head))


def _turns(head: Any) -> dict[str, list[Any]]:
    """Return the turns of a frame, as ``_call`` returns its call; frames of earlier versions have none."""
    turns: dict[str, list[Any]] = head.get("turns", {})
    if turns and not {"sample", "turn", "role"} <= turns.keys():
        raise ValueError("the turns lack a column")
    if len(set(map(len, turns.values()))) > 1:
        raise ValueError("columns of turns differ in length")
    return turns
