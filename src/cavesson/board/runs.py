"""The runs that a board shows, each with its record and its index."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

import cavesson.record
from cavesson.board.cache import Cache
from cavesson.board.expressions import compiled
from cavesson.board.folders import run_folders
from cavesson.board.names import name_below, names_of
from cavesson.board.scanner import Scanner, spans
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
from cavesson.record.labels import LabelFile
from cavesson.record.notes import NoteFile
from cavesson.record.read.index_folder import fingerprint, index_folder, local_folder
from cavesson.record.storage import storage
from cavesson.record.write.lock import is_free
from cavesson.text.counting import counted
from cavesson.text.visible import visible
from cavesson.text.words import split

LIVE_SECONDS = 120
LOOK_SECONDS = 2.0
"""Seconds between two looks for new runs in a folder."""
T = TypeVar("T")


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
    """A run on the board, under the name of its address; ``scanner`` searches texts for regular expressions."""

    def __init__(self, key: str, record: Run, scanner: Scanner, allow_remote: bool = False) -> None:
        self.scanner = scanner
        self.allow_remote = allow_remote
        self.key = key
        self.record = record
        self.folder = index_folder(record)
        self.labels = LabelFile(record)
        self.notes = NoteFile(record)
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
        """The name of the folder, with those of its parents if another run on the board is called the same."""
        parts = Path(self.record.folder).absolute().parts
        return "/".join(parts[-1 - self.key.count("/") :]) or self.record.folder

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
        if self.gone:
            return False
        folder = local_folder(self.record)
        path = self.folder / "state.json" if folder is None else folder / "record"
        try:
            return time.time() - path.stat().st_mtime < LIVE_SECONDS
        except FileNotFoundError:
            return True

    @property
    def gone(self) -> bool:
        """Whether the folder of a run that had begun was deleted, moved or renamed.

        An index that is being written may put an empty folder in its place.
        """
        folder = local_folder(self.record)
        return folder is not None and bool(self.record.info) and not (folder / "run.json").exists()

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
        if not self.record.vocabulary.num_rows and not self.gone:
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


class Listed(NamedTuple):
    """A run of a folder, which may never have been looked at."""

    key: str
    name: str
    path: str


class Board:
    """The runs by their names, and the state that requests are answered from.

    Runs of ``records`` are open from the beginning. Those in ``folders`` are looked for again and again, and opened
    when they are looked at. ``closing`` is set at shutdown.
    """

    def __init__(
        self,
        records: Sequence[Run],
        closing: threading.Event | None = None,
        allow_remote: bool = False,
        folders: Sequence[Path] = (),
    ) -> None:
        self.closing = closing or threading.Event()
        self.allow_remote = allow_remote
        self.folders = [folder.absolute() for folder in folders]
        self._follow: Callable[[OpenRun], None] | None = None
        self.scanner = Scanner()
        self._lock = threading.Lock()
        self._looked = -math.inf
        self._listed: dict[str, Listed] = {}
        self._open: dict[str, OpenRun] = {}
        self._known: dict[str, tuple[Any, Any]] = {}
        names = names_of([Path(record.folder).absolute() for record in records])
        for name, record in zip(names, records, strict=True):
            run = self._open[name] = OpenRun(name, record, self.scanner, allow_remote)
            self._listed[name] = Listed(name, run.name, str(record.folder))
        self._given = set(names)
        self.look()

    @property
    def runs(self) -> list[OpenRun]:
        """Those that are open."""
        return list(self._open.values())

    @property
    def names(self) -> set[str]:
        """Those of all runs that were there at the last look."""
        return set(self._listed)

    def all(self) -> list[OpenRun | Listed]:
        """Return every run: open, or as it is listed."""
        return [self._open.get(one.key, one) for one in self.listed()]

    def listed(self) -> list[Listed]:
        """Return every run, as of now."""
        self.look()
        return list(self._listed.values())

    def look(self) -> None:
        """Look for runs that have appeared in the folders, unless that was done just now. A run keeps its name."""
        with self._lock:
            if not self.folders or time.monotonic() - self._looked < LOOK_SECONDS:
                return
            found = {str(folder): (root, folder) for root in self.folders for folder in run_folders(root)}
            listed = {key: one for key, one in self._listed.items() if key in self._open or one.path in found}
            there = {os.path.abspath(one.path) for one in listed.values()}
            for path, (root, folder) in ((path, place) for path, place in found.items() if path not in there):
                name = name_below(folder, root, listed)
                listed[name] = Listed(name, "/".join(folder.parts[-1 - name.count("/") :]), path)
            self._listed = dict(sorted(listed.items(), key=lambda item: item[0] not in self._given))
            self._looked = time.monotonic()

    def run(self, name: str) -> OpenRun:
        """Return the run with a name, which is opened if it is not open yet.

        Raises:
            NotFoundError: There is no such run, or its folder is gone.
            UserError: It cannot be opened.
        """
        run = self._open.get(name)
        if run is not None and run.gone:
            raise NotFoundError(f"the run {name} is gone: {run.record.folder} was deleted, moved or renamed")
        if run is not None:
            return run
        listed = {one.key: one for one in self.listed()}
        if name not in listed:
            near = get_close_matches(name, listed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the board has {counted(len(listed), 'run')}"
            raise NotFoundError(f"there is no run {visible(name[:100])}; {hint}")
        with self._lock:
            if name not in self._open:
                record = open_run(listed[name].path, wait=False, allow_remote=self.allow_remote)
                self._open[name] = OpenRun(name, record, self.scanner, self.allow_remote)
                if self._follow is not None:
                    self._follow(self._open[name])
        return self._open[name]

    def follow(self, act: Callable[[OpenRun], None]) -> None:
        """Call a function for every run that is open, or will be opened."""
        with self._lock:
            self._follow = act
            for run in self._open.values():
                act(run)

    def known(self, path: str, stamp: Any, read: Callable[[], T]) -> T:
        """Return what was read of a run folder with this stamp, reading it if that has changed."""
        before = self._known.get(path)
        if before is None or before[0] != stamp:
            before = self._known[path] = (stamp, read())
        found: T = before[1]
        return found

    def warm(self) -> None:
        """Load in advance what will be needed soon."""
        with suppress(UserError):  # most likely, the board is stopping; otherwise, the first search reports the error
            self.scanner.start()
        split([""])
        spans([""], compiled("", regex=False))  # triggers imports that the first text would wait for
        for run in self.runs:
            with suppress(FileNotFoundError):  # its folder was moved in the meantime, as requests report
                run.warm()
