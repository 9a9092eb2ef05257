"""Read another tool's files into a run folder: once, or continuously while they are being written."""

import json
import math
import signal
import time
from base64 import b64encode
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.handlers import handling
from cavesson.importers.batch import PartsRead, RolloutBuffer
from cavesson.importers.databases import inside
from cavesson.importers.metrics import aligned, read_metrics
from cavesson.importers.model_names import Named, model_named
from cavesson.importers.numeric import numeric_columns
from cavesson.importers.prime_annotations import LATER, arrival
from cavesson.importers.processes import read_parts
from cavesson.importers.reading import WANDB_TABLE, File, Record, readable
from cavesson.importers.rollout import Broken, Format, Tokenizer
from cavesson.importers.sources import Source, first_records
from cavesson.importers.texts import completed
from cavesson.record import begin_attempt, write_run, write_vocabulary
from cavesson.record import open as open_run
from cavesson.record.maintain.compaction import commit
from cavesson.record.splits import is_held_out
from cavesson.record.storage import Folder
from cavesson.record.write.lock import Lock
from cavesson.record.write.new_folder import check_free, new_folder
from cavesson.record.write.writable import check_writable
from cavesson.record.write.writing import write_metrics
from cavesson.text.counting import counted

AT_ONCE = 16 << 20
"""Bytes of source, or of rollouts in memory, that a process holds at a time before they are written."""
WORTH = 4
"""So many portions are worth the start of a further process."""
WAIT = 0.5
"""Seconds between two looks at files that are being written."""
SAMPLED = 50
"""Files whose first records show what their columns hold."""
QUOTED = 5
"""How many broken records a report quotes."""


class ImportReport(NamedTuple):
    """The result of an import."""

    format: str
    files: int
    rollouts: int
    rejected: int
    quotes: list[str]
    """The first broken records: file, line and reason."""
    notes: list[str]


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
        kept |= {"reason": reason} | _content_of(record)
        # ASCII ensures that every reader splits lines the same way and that no control character reaches a terminal.
        with self._path.open("a", encoding="ascii", newline="\n") as file:
            file.write(_line_of(kept) + "\n")
        self.count += 1
        if len(self.quotes) < QUOTED:
            self.quotes.append(f"{where}: {reason}")


class Import:
    """The state of one import into a run folder: it counts rollouts and numbers the samples of each step."""

    def __init__(self, folder: Path, format: Format, tokenizer: Tokenizer | None) -> None:
        self.rejected = Rejected(folder)
        self.count = 0
        self.notes: list[str] = []
        self._folder = folder
        self._format = format
        self._is_prepared = False
        self._remarks: Counter[str] = Counter()
        self.annotations = None if format.annotations is None else format.annotations()
        self.batch = RolloutBuffer(folder, format, self.annotations, tokenizer)
        if tokenizer is not None:
            write_vocabulary(folder, tokenizer.tokens, tokenizer.texts)
        self._waiting: deque[tuple[File, Record, int]] = deque()
        self._newest = 0
        self._samples: Counter[int] = Counter()
        self._lines: Counter[Path] = Counter()

    @property
    def seen(self) -> int:
        """The number of rollouts read, records rejected and records waiting."""
        return self.count + self.rejected.count + len(self._waiting)

    def prepare(self, files: Iterable[File]) -> None:
        """Check the first records, once there are some, and find columns of numbers that are written as texts."""
        if self._is_prepared:
            return
        sampled = [file.path for file in islice(files, SAMPLED)]
        if any(True for path in sampled for _ in first_records(path)):
            self._format.check(chain.from_iterable(map(first_records, sampled)))
            self.batch.numeric = numeric_columns(chain.from_iterable(map(first_records, sampled)))
            self._is_prepared = True

    def remarks(self, source: Path, files: Iterable[File]) -> list[str]:
        """Return the remarks on rollouts of the files of a source, each with their number."""

        @cache
        def named() -> Named | None:
            return model_named(source, chain.from_iterable(first_records(file.path) for file in islice(files, SAMPLED)))

        return [f"{completed(one, named)} ({counted(count, 'rollout')})" for one, count in self._remarks.items()]

    def numbers(self, steps: Counter[int]) -> dict[int, int]:
        """Reserve sample numbers for the rollouts of each step, and return the first number of each."""
        first = {step: self._samples[step] for step in steps}
        self._samples.update(steps)
        self.count += steps.total()
        return first

    def account(self, parts: Sequence[File], found: PartsRead) -> dict[int, int]:
        """Record the rejected records and lines of the next parts of files, and return the same as ``numbers``."""
        for part, broken, lines in zip(parts, found.broken, found.lines, strict=True):
            for record, reason in broken:
                moved = None if record is None else record._replace(line=record.line + self._lines[part.path])
                self.rejected.add(part.path, moved, reason)
            self._lines[part.path] += lines
        self._remarks.update(found.remarks)
        return self.numbers(found.steps)

    def read(self, file: File, last: bool, ended: Event) -> None:
        """Read the new, complete records of a file in the current process, until ``ended`` is set."""
        for record in readable(file, last, unreadable=lambda reason: self.rejected.add(file.path, None, reason)):
            step = arrival(record.content) if self.annotations and isinstance(record.content, bytes) else None
            if step is None:
                self._add(file, record)
            else:
                self._newest = max(self._newest, step)
                self._waiting.append((file, record, step))
            if ended.is_set():
                return

    def read_annotations(self, files: Sequence[File], last: bool) -> None:
        """Read new annotations of the records in these files."""
        if self.annotations is not None:
            for path, record, reason in self.annotations.read([file.path for file in files], last):
                self.rejected.add(path, record, reason)

    def release(self, last: bool) -> None:
        """Add the records that need not wait for annotations any longer; all records if ``last`` is true."""
        while self._waiting and (last or self._waiting[0][2] <= self._newest - LATER):
            file, record, _ = self._waiting.popleft()
            self._add(file, record)

    def _add(self, file: File, record: Record) -> None:
        try:
            self.batch.add(file, record)
        except Broken as reason:
            self.rejected.add(file.path, record, str(reason))
        if self.batch.size >= AT_ONCE:
            self.write()

    def write(self) -> None:
        """Commit what was read in the current process to the record."""
        self._remarks.update(self.batch.remarks)
        if first := self.numbers(self.batch.steps):
            commit(self._folder, [self.batch.write(first)])


def read_once(
    source: Source, run: Path, format: Format, tokenizer: Tokenizer | None = None, metrics: Path | None = None
) -> ImportReport:
    """Read the existing files; the run folder appears complete at the end or not at all."""
    logged = None if metrics is None else read_metrics(metrics)
    with new_folder(run) as folder:
        files = source.files(format)
        work = Import(folder, format, tokenizer)
        work.prepare(files)
        _describe(folder, source.path, format, files)
        work.read_annotations(files, last=True)
        of_lines = [file for file in files if not file.is_table]
        processes = 1 + sum(file.size() for file in of_lines) // (WORTH * AT_ONCE)
        commit(folder, read_parts(_portions(of_lines), processes, work.batch, work.account))
        for file in files:
            if file.is_table:
                work.read(file, last=True, ended=Event())
        work.write()
        if not work.count:
            none = f"none of {work.rejected.count} records is a rollout of {format.name}; the first: "
            found = none + work.rejected.quotes[0] if work.rejected.count else "no records were found"
            raise UserError(f"{source.path}: {found}")
        if logged is not None:
            logged = aligned(logged, _rewards(folder))
            write_metrics(Folder(folder), 0, 0, logged.values)
            work.notes += logged.notes
        work.notes += source.notes(format, files)
        return _report(work, source, format, files)


def _rewards(folder: Path) -> dict[int, float]:
    """Return the mean reward of each step's rollouts; those of training, if there are any."""
    rows = open_run(folder).rows(["step", "reward", "split"])
    held_out = is_held_out(rows["split"])
    trained = rows.filter(pc.invert(held_out))
    means = (trained if len(trained) else rows).group_by("step").aggregate([("reward", "mean")])
    pairs = zip(means["step"].to_pylist(), means["reward_mean"].to_pylist(), strict=True)
    return {step: math.nan if mean is None else mean for step, mean in pairs}


def _portions(files: Iterable[File]) -> Iterator[list[File]]:
    """Yield lists of parts of files that a process reads at once; small files are grouped."""
    held: list[File] = []
    size = 0
    for file in files:
        for part in file.parts(AT_ONCE):
            held.append(part)
            size += part.size()
            if size >= AT_ONCE:
                yield held
                held, size = [], 0
    if held:
        yield held


def follow(
    source: Source,
    run: Path,
    format: Format,
    tokenizer: Tokenizer | None,
    until_idle: float | None,
    progress: Callable[[int, int], None],
) -> ImportReport:
    """Read existing and new data until Ctrl-C, or until nothing new has arrived for ``until_idle`` seconds."""
    check_writable(run)
    check_free(run)
    ended = Event()
    files: dict[Path, File] = {}
    # Ctrl-C and SIGTERM set an event instead of interrupting the program at an arbitrary point.
    with Lock(run) as lock, handling(lambda *_: ended.set(), signal.SIGINT, signal.SIGTERM):
        check_free(run)  # the previous holder of the lock may have just written it
        work = Import(run, format, tokenizer)
        _describe(run, source.path, format, [])
        for _ in _looks(until_idle, lambda: work.seen, ended):
            _check_there(run, work, lock)
            _look(source, format, files, work, ended)
            work.read_annotations(list(files.values()), last=False)
            work.release(last=False)
            work.write()
            progress(work.count, work.rejected.count)
        if ended.is_set():
            work.notes += ["ended by a signal", *_unread(files.values())]
        for file in files.values():
            if file.grown() and not ended.is_set():
                work.read(file, last=True, ended=ended)
        work.read_annotations(list(files.values()), last=True)
        work.release(last=True)
        work.write()
        _describe(run, source.path, format, list(files.values()))
    work.notes += source.notes(format, files.values())
    return _report(work, source, format, [*files.values()])


def _check_there(run: Path, work: Import, lock: Lock) -> None:
    """Check that the run folder still exists and is still locked, so that no incomplete record is written."""
    there = not work.count or (run / "record").is_dir()
    lock.check()  # after the look at the folder: if the whole run was deleted, the error names the run
    if not there:
        raise UserError(f"{run / 'record'} was deleted or moved while it was being written")


def _unread(files: Iterable[File]) -> list[str]:
    """Return a note on the files that were not read to the end, if there are any."""
    names = [str(file.path) for file in files if file.grown()]
    return [f"the end of {counted(len(names), 'file')} was not read, such as of {names[0]}"] if names else []


def _look(source: Source, format: Format, files: dict[Path, File], work: Import, ended: Event) -> None:
    found = source.files(format, missing_ok=True)
    work.prepare(found)
    for file in found:
        if file.path.name.endswith(WANDB_TABLE) and not format.new_tables:
            raise UserError(f"{file.path} is rewritten at every step: import it without --follow")
        if inside(file.path) is not None:
            raise UserError(f"{file.path} is in a database: import it without --follow")
        if file.path not in files:
            file.rank = _free_rank(file.rank, {known.rank for known in files.values()})
        known = files.setdefault(file.path, file)
        if known.rewritten():
            raise UserError(
                f"{file.path} was rewritten while it was followed, and the record keeps what was read "
                "before: import it again into another folder"
            )
        if known.grown() and not ended.is_set():
            work.read(known, last=False, ended=ended)


def _free_rank(rank: int | None, taken: set[int | None]) -> int | None:
    """Return the rank, or the smallest one that no file has: files without numbers are counted anew at each look."""
    return rank if rank is None or rank not in taken else min({*range(len(taken) + 1)} - taken)


def _looks(until_idle: float | None, seen: Callable[[], int], ended: Event) -> Iterator[None]:
    """Yield once per poll until ``ended`` is set or nothing new was seen for ``until_idle`` seconds."""
    latest, since = -1, time.monotonic()
    while until_idle is None or time.monotonic() - since < until_idle:
        yield
        if seen() != latest:
            latest, since = seen(), time.monotonic()
        if ended.wait(WAIT):
            return


def _describe(folder: Path, source: Path, format: Format, files: list[File]) -> None:
    info = {"source": _name(source.resolve()), "format": format.name, "files": len(files)}
    if format.ranks:
        info["ranks"] = {str(file.rank): _name(file.path.name) for file in files if file.rank is not None}
    write_run(folder, info)
    if not (folder / "attempts").exists():
        begin_attempt(folder, 0)


def _name(path: Path | str) -> str:
    """Return a file name that UTF-8 can encode; bytes that are not UTF-8 are escaped."""
    return str(path).encode(errors="backslashreplace").decode()


def _report(work: Import, source: Source, format: Format, files: Sequence[File]) -> ImportReport:
    notes = [*work.remarks(source.path, files), *work.notes]
    return ImportReport(format.name, len(files), work.count, work.rejected.count, work.rejected.quotes, notes)


def _line_of(kept: dict[str, Any]) -> str:
    try:
        return json.dumps(kept, default=str)
    except (RecursionError, TypeError):  # a row that is nested too deeply, or has keys that JSON does not allow
        return json.dumps({name: value for name, value in kept.items() if name != "row"})


def _content_of(record: Record | None) -> dict[str, Any]:
    if record is None or record.content is None:
        return {}
    if isinstance(record.content, dict):
        return {"row": record.content}
    try:
        return {"text": record.content.decode()}
    except UnicodeDecodeError:
        return {"base64": b64encode(record.content).decode()}
