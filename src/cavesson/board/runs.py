"""The runs that a board shows, each with its record and its index."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import cavesson.record
from cavesson.board.expressions import compiled
from cavesson.board.memory import Memory
from cavesson.board.scanner import Scanner, spans
from cavesson.board.stars import Stars
from cavesson.errors import UserError, first_line, print_exception
from cavesson.index.columns import Array
from cavesson.index.folder import PROBLEM
from cavesson.index.maps import ask_for
from cavesson.index.patterns import read_counts
from cavesson.index.search import dictionary
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.index.texts import Texts, read_texts
from cavesson.index.words import words
from cavesson.record import Run
from cavesson.record.index_folder import fingerprint, index_folder, local_folder
from cavesson.record.storage import storage

LIVE_SECONDS = 120


class NotFoundError(UserError):
    """What was asked for is not in the record."""


class UnreadableError(UserError):
    """A file of the record or of the index is broken, or has just been replaced."""


@contextmanager
def reading() -> Iterator[None]:
    """Tells in one line what a broken file of the record leads to, wherever that is noticed."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        print_exception(error)
        raise UnreadableError(f"the record cannot be read: {first_line(error)}") from error


def open_run(path: str) -> Run:
    """Opens a run, or what may become one: a folder that is not there yet or is empty.

    Raises:
        UserError: It is something else.
    """
    try:
        return cavesson.record.open(path)
    except UserError:
        folder = Path(path)
        is_empty = folder.is_dir() and not any(folder.iterdir())
        if "://" in path or not (is_empty or (folder.parent.is_dir() and not os.path.lexists(folder))):
            raise
        return Run(storage(folder), {})


class OpenRun:
    """One run on the board.

    Args:
        number: Place on the command line.
        record: The opened record.
        scanner: What looks for regular expressions.
    """

    def __init__(self, number: int, record: Run, scanner: Scanner) -> None:
        self.scanner = scanner
        self.number = number
        self.record = record
        self.folder = index_folder(record)
        self.stars = Stars(record, self.folder)
        self._snapshot = snapshot(self.folder)
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self.memory = Memory()
        self.searching: object = None
        """What was searched for last; whatever else is looked for waits until somebody asks for it again."""

    @property
    def name(self) -> str:
        return Path(self.record.folder).name or str(self.record.folder)

    def snapshot(self) -> Snapshot:
        """Returns what the index holds now."""
        with self._lock:
            try:
                status = (self.folder / "state.json").stat()
            except FileNotFoundError:
                return self._snapshot
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != self._stamp:
                self._stamp = stamp
                self._show(snapshot(self.folder))
            return self._snapshot

    def _show(self, new: Snapshot) -> None:
        """Takes what the index holds now, which may be that of another run that was begun in the same place."""
        old, self._snapshot = self._snapshot, new
        if new.state.run and new.state.run != fingerprint(self.record):
            self.record = open_run(self.record.folder)
        if new.state.run != old.state.run or new.rows < old.rows or new.state.dead < old.state.dead:
            # Files of the same names hold something else now.
            self.memory = Memory()
            dictionary.cache_clear()
            read_counts.cache_clear()

    @property
    def live(self) -> bool:
        """Whether something was recorded within the last two minutes."""
        folder = local_folder(self.record)
        path = self.folder / "state.json" if folder is None else folder / "record"
        try:
            return time.time() - path.stat().st_mtime < LIVE_SECONDS
        except FileNotFoundError:
            return True

    @property
    def problem(self) -> str | None:
        """Why the index does not grow, if it does not."""
        try:
            return (self.folder / PROBLEM).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def fetch(self, keys: Sequence[tuple[int, int]], columns: Sequence[str] | None = None) -> pa.Table:
        """Returns the rows of some rollouts by step and sample, in the order asked for."""
        with reading():
            return self.record.fetch(keys, columns)

    def texts(self, snapshot: Snapshot, rows: Array) -> Texts:
        """Returns the beginnings of the texts of some rows of the index."""
        with reading():
            return read_texts(self.record, snapshot, rows)

    def version(self) -> str | None:
        """Returns what changes when the record has grown."""
        return self.snapshot().state.cursor

    def indexed(self) -> float:
        """Returns which share of the rollouts can be searched, from 0 to 1."""
        state = self.snapshot().state
        if state.rows:
            return state.text_rows / state.rows
        return 0.0 if self.record.segments() else 1.0

    def token_columns(self) -> list[str]:
        """Returns the token columns that the first tokens of the run have numbers for."""
        if not self.snapshot().rows:
            return []
        return self.memory.get("token columns", (), lambda: _measured(self.record), most=1)

    def token_texts(self, ids: Sequence[int | None]) -> list[str]:
        """Returns the text of each id."""
        if not self.record.vocabulary.num_rows:
            self.record = open_run(self.record.folder)  # it may have come since
        return self.record.token_texts(ids)

    def warm(self) -> None:
        """Reads beforehand what every page needs."""
        self.token_texts([])
        state = self.snapshot().state
        names = [*(column.file for column in state.columns.values()), *state.orders.values()]
        ask_for(self.folder / name for name in names)
        dictionary(self.folder, state.pieces)


def _measured(record: Run) -> list[str]:
    """Returns the columns of the first tokens of the first segment that has any."""
    for segment in record.segments():
        try:
            tokens = record.read(segment, "tokens", count=256)
        except (OSError, pa.ArrowException, UserError):
            continue  # merged with others meanwhile, which come later; or broken, which is told when it is shown
        if tokens.num_rows:
            return [name for name in tokens.column_names if not _is_empty(tokens[name])]
    return []


def _is_empty(column: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.is_null(column, nan_is_null=True)).as_py())


class Board:
    """Everything a request can ask about.

    Args:
        records: The opened records, in the order in which they are numbered.
        closing: Is set when the board is told to stop.
    """

    def __init__(self, records: Sequence[Run], closing: threading.Event | None = None) -> None:
        self.closing = closing or threading.Event()
        self.scanner = Scanner()
        self.runs = [OpenRun(number, record, self.scanner) for number, record in enumerate(records)]

    def run(self, number: int) -> OpenRun:
        """Returns a run by its number.

        Raises:
            NotFoundError: There is none of that number.
        """
        if not 0 <= number < len(self.runs):
            raise NotFoundError(f"there is no run {number}; there are {len(self.runs)}, counted from 0")
        return self.runs[number]

    def warm(self) -> None:
        """Makes ready what will be needed soon."""
        with suppress(UserError):  # the board is told to stop, most likely; whoever searches is told
            self.scanner.start()
        words([""])
        spans([""], compiled("", regex=False))  # imports what the first answer with a text would wait for
        for run in self.runs:
            run.warm()
