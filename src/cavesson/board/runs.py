"""The runs that a board shows, each with its record and its index."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

import cavesson.record
from cavesson.board.cache import Cache
from cavesson.board.expressions import compiled
from cavesson.board.scanner import Scanner, spans
from cavesson.board.stars import Stars
from cavesson.errors import UserError, first_line, print_exception
from cavesson.index.columns import Array
from cavesson.index.folder import PROBLEM
from cavesson.index.maps import ask_for
from cavesson.index.patterns import read_counts
from cavesson.index.search import dictionary
from cavesson.index.snapshot import Snapshot, snapshot
from cavesson.index.texts import RowTexts, read_texts
from cavesson.index.turns import read_turns
from cavesson.record import Run
from cavesson.record.read.index_folder import fingerprint, index_folder, local_folder
from cavesson.record.storage import storage
from cavesson.record.write.lock import is_free
from cavesson.text.counting import counted
from cavesson.text.words import split

LIVE_SECONDS = 120


class NotFoundError(UserError):
    """The record does not contain what was requested."""


class UnreadableError(UserError):
    """A file of the record or of the index is broken, or has just been replaced."""


class Partial(NamedTuple):
    """How far an index that is being built has come."""

    indexed: int
    of: int
    """rollouts"""


@contextmanager
def reading() -> Iterator[None]:
    """Convert errors from broken files of the record into an ``UnreadableError`` with a one-line message."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        print_exception(error)
        raise UnreadableError(f"the record cannot be read: {first_line(error)}") from error


def open_run(path: str, wait: bool = True, allow_remote: bool = False) -> Run:
    """Open a run, or, with ``wait``, a folder that can become one because it is empty or does not exist yet.

    Raises:
        UserError: The path is something else.
    """
    try:
        return cavesson.record.open(path, allow_remote)
    except UserError as error:
        if "://" in path or not is_free(Path(path)):
            raise
        if not wait:
            raise UserError(f"{error}\n--wait shows a run that has not begun yet, once it begins") from None
        return Run(storage(path), {})


class OpenRun:
    """A run on the board, with its number on the command line; ``scanner`` searches texts for regular expressions."""

    def __init__(self, number: int, record: Run, scanner: Scanner, allow_remote: bool = False) -> None:
        self.scanner = scanner
        self.allow_remote = allow_remote
        self.number = number
        self.record = record
        self.folder = index_folder(record)
        self.stars = Stars(record, self.folder)
        self._snapshot = snapshot(self.folder)
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self.cache = Cache()
        self.prompt_tables = Cache()
        """Apart from the other results: a search must not wait for them."""
        self.searching: object = None
        """What was searched for last; whatever else is looked for waits until somebody asks for it again."""

    @property
    def name(self) -> str:
        return Path(self.record.folder).name or str(self.record.folder)

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the index."""
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
        """Switch to a new snapshot, which may be of another run that was started in the same folder."""
        old, self._snapshot = self._snapshot, new
        if new.state.run and new.state.run != fingerprint(self.record):
            self.record = open_run(self.record.folder, allow_remote=self.allow_remote)
        rescored = new.state.rescored_files != old.state.rescored_files or new.state.rescored != old.state.rescored
        if new.state.run != old.state.run or new.rows < old.rows or new.state.dead < old.state.dead or rescored:
            # The same names have different content now.
            self.cache, self.prompt_tables = Cache(), Cache()
            dictionary.cache_clear()
            read_counts.cache_clear()

    @property
    def live(self) -> bool:
        """Whether anything was recorded within the last two minutes."""
        folder = local_folder(self.record)
        path = self.folder / "state.json" if folder is None else folder / "record"
        try:
            return time.time() - path.stat().st_mtime < LIVE_SECONDS
        except FileNotFoundError:
            return True

    @property
    def problem(self) -> str | None:
        """Why the index does not grow; None if there is no problem."""
        try:
            return (self.folder / PROBLEM).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    def fetch(self, keys: Sequence[tuple[int, int]], columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows of some rollouts, given by step and sample, in the given order."""
        with reading():
            return self.record.fetch(keys, columns)

    def texts(self, snapshot: Snapshot, rows: Array) -> RowTexts:
        """Return the beginnings of the texts of some rows of the index."""
        with reading():
            return read_texts(self.record, snapshot, rows)

    def turns(self, snapshot: Snapshot, rows: Array) -> pa.Table:
        """Return the turns of some rows of the index."""
        with reading():
            return read_turns(self.record, snapshot, rows)

    def version(self) -> str | None:
        """Return a value that changes when the record has grown."""
        return self.snapshot().state.cursor

    def partial(self, texts: bool) -> Partial | None:
        """Return how much of the record is indexed; None if all of it is.

        With ``texts``, the words of the responses must be indexed, too, as a search needs them.
        """
        state = self.snapshot().state
        known, total = state.text_rows if texts else state.rows, max(state.rows, state.recorded)
        if state.cursor is None and not total and self.record.info:
            with reading():
                total = self.cache.get("recorded", (), lambda: self.record.rows(["step"]).num_rows, most=1)
        return Partial(known, total) if known < total else None

    def indexed(self) -> float:
        """Return the share of the rollouts that can be searched, from 0 to 1."""
        partial = self.partial(texts=True)
        return 1.0 if partial is None else partial.indexed / partial.of

    def token_columns(self) -> list[str]:
        """Return the token columns that have values for the first tokens of the run."""
        if not self.snapshot().rows:
            return []
        return self.cache.get("token columns", (), lambda: _measured(self.record), most=1)

    def token_texts(self, ids: Sequence[int | None]) -> list[str]:
        """Return the text of each token ID."""
        if not self.record.vocabulary.num_rows:
            # The vocabulary may have been written in the meantime.
            self.record = open_run(self.record.folder, allow_remote=self.allow_remote)
        return self.record.token_texts(ids)

    def warm(self) -> None:
        """Load in advance what every page needs."""
        self.token_texts([])
        state = self.snapshot().state
        names = [*(column.file for column in state.columns.values()), *state.orders.values()]
        ask_for(self.folder / name for name in names)
        dictionary(self.folder, state.pieces)


def _measured(record: Run) -> list[str]:
    """Return the columns that have values for the first tokens of the first segment with tokens."""
    for segment in record.segments():
        try:
            tokens = record.read(segment, "tokens", count=256)
        except (OSError, pa.ArrowException, UserError):
            continue  # merged into a later segment in the meantime, or broken, which is reported when shown
        if tokens.num_rows:
            empty = {name: pc.all(tokens[name].is_null(nan_is_null=True)).as_py() for name in tokens.column_names}
            return [name for name, is_empty in empty.items() if not is_empty]
    return []


class Board:
    """The runs, in the order of their numbers, and the state that requests are answered from.

    ``closing`` is set at shutdown.
    """

    def __init__(
        self, records: Sequence[Run], closing: threading.Event | None = None, allow_remote: bool = False
    ) -> None:
        self.closing = closing or threading.Event()
        self.allow_remote = allow_remote
        self.scanner = Scanner()
        self.runs = [OpenRun(number, record, self.scanner, allow_remote) for number, record in enumerate(records)]

    def run(self, number: int) -> OpenRun:
        """Return the run with a number, or raise a NotFoundError."""
        if not 0 <= number < len(self.runs):
            raise NotFoundError(
                f"there is no run {number}; the board has {counted(len(self.runs), 'run')}, numbered from 0"
            )
        return self.runs[number]

    def warm(self) -> None:
        """Load in advance what will be needed soon."""
        with suppress(UserError):  # most likely, the board is stopping; otherwise, the first search reports the error
            self.scanner.start()
        split([""])
        spans([""], compiled("", regex=False))  # triggers imports that the first text would wait for
        for run in self.runs:
            run.warm()
