"""Reads another tool's files into a run folder: once, or for as long as they are being written."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from dressage.errors import UserError
from dressage.importers.reading import WANDB_TABLE, File, Record
from dressage.importers.rejected import Rejected
from dressage.importers.rollout import Broken, Format, Inexact, Place, Rollout, parse, parse_exactly
from dressage.importers.sources import files_of
from dressage.importers.tables import tables_of
from dressage.record import begin_attempt, write_rollouts, write_run
from dressage.record.files import new_folder

AT_ONCE = 24 << 20
"""Bytes of source that are held at a time before they are written."""
WAIT = 0.5
"""Seconds between two looks at files that are being written."""


class Report(NamedTuple):
    """What an import did."""

    format: str
    files: int
    rollouts: int
    rejected: int
    quotes: list[str]
    """The first broken records: file, line and reason."""
    notes: list[str]


class Import:
    """One import into one run folder.

    The calling thread parses; a second one makes tables of what was parsed and writes them, at most one batch behind.
    """

    def __init__(self, folder: Path, format: Format) -> None:
        self._folder = folder
        self._format = format
        self.rejected = Rejected(folder)
        self.count = 0
        self.notes: list[str] = []
        self._samples: Counter[int] = Counter()
        self._batch: list[Rollout] = []
        self._held = 0
        self._writing: Future[None] | None = None
        self._writer = ThreadPoolExecutor(1, "import")

    def read(self, file: File, last: bool) -> None:
        """Reads what is whole and new of a file."""
        try:
            for record in file.read(last):
                self._add(file, record)
        except (OSError, ValueError) as error:
            self.rejected.add(file.path, None, f"the file cannot be read: {str(error)[:200]}")

    def _add(self, file: File, record: Record) -> None:
        if isinstance(record.content, bytes) and not record.content.strip():
            return
        try:
            found = list(self._parsed(file, record))
        except Broken as reason:
            self.rejected.add(file.path, record, str(reason))
            return
        self._batch += found
        self.count += len(found)
        self._held += max(record.size, 1024)
        if self._held >= AT_ONCE:
            self.write()

    def _parsed(self, file: File, record: Record) -> list[Rollout]:
        place = Place(file.path, record.line, file.rank)
        if record.content is None:
            raise Broken("the line is too long to be read")
        if not isinstance(record.content, bytes):
            return list(self._format.rollouts(record.content, place._replace(exact=True)))
        try:
            return list(self._format.rollouts(_object(parse(record.content)), place))
        except Inexact:
            exact = _object(parse_exactly(record.content))
            return list(self._format.rollouts(exact, place._replace(exact=True)))

    def write(self) -> None:
        """Hands over what is held; waits until the batch before it is written."""
        if not self._batch:
            return
        batch = sorted(self._batch, key=lambda rollout: rollout.step)
        samples = [self._next_sample(rollout.step) for rollout in batch]
        self._batch, self._held = [], 0
        self.wait()
        self._writing = self._writer.submit(_write, self._folder, batch, samples)

    def _next_sample(self, step: int) -> int:
        self._samples[step] += 1
        return self._samples[step] - 1

    def wait(self) -> None:
        """Returns when everything handed over is on disk."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        self._writer.shutdown()


def _object(content: object) -> dict[str, object]:
    if not isinstance(content, dict):
        raise Broken(f"expected a JSON object, found {type(content).__name__}")
    return content


def _write(folder: Path, batch: list[Rollout], samples: list[int]) -> None:
    write_rollouts(folder, 0, *tables_of(batch, samples))


def read_once(source: Path, run: Path, format: Format) -> Report:
    """Reads what is there; the run folder appears whole at the end, or not at all."""
    with new_folder(run) as folder, ExitStack() as stack:
        work = Import(folder, format)
        stack.callback(work.close)
        files = files_of(source, format)
        _describe(folder, source, format, files)
        for file in files:
            work.read(file, last=True)
        work.write()
        work.wait()
        if work.rejected.count and not work.count:
            raise UserError(_nothing(source, format, work.rejected))
        return _report(work, format, len(files))


def follow(
    source: Path,
    run: Path,
    format: Format,
    until_idle: float | None,
    progress: Callable[[int, int], None],
) -> Report:
    """Reads what is there and what comes, until Ctrl-C or until nothing came for ``until_idle`` seconds."""
    if run.exists() and any(run.iterdir()):
        raise UserError(f"{run} exists and is not an empty folder: name a new one, or remove it first")
    files: dict[Path, File] = {}
    with ExitStack() as stack:
        work = Import(run, format)
        stack.callback(work.close)
        _describe(run, source, format, [])
        try:
            for _ in _looks(until_idle, lambda: work.count + work.rejected.count):
                _look(source, format, files, work)
                work.write()
                progress(work.count, work.rejected.count)
        except KeyboardInterrupt:
            work.notes.append("ended by Ctrl-C")
        for file in files.values():
            work.read(file, last=False)
        work.write()
        work.wait()
        _describe(run, source, format, list(files.values()))
        return _report(work, format, len(files))


def _look(source: Path, format: Format, files: dict[Path, File], work: Import) -> None:
    for file in files_of(source, format, missing_ok=True):
        if file.path.name.endswith(WANDB_TABLE):
            raise UserError(f"{file.path} is written anew with every step: import it without --follow")
        known = files.setdefault(file.path, file)
        if known.shrunk():
            raise UserError(f"{file.path} became shorter while it was followed: it was written anew; import it again")
        if known.grown():
            work.read(known, last=False)


def _looks(until_idle: float | None, seen: Callable[[], int]) -> Iterator[None]:
    """Yields at every look, until nothing new was seen for ``until_idle`` seconds."""
    latest, since = -1, time.monotonic()
    while until_idle is None or time.monotonic() - since < until_idle:
        yield
        if seen() != latest:
            latest, since = seen(), time.monotonic()
        time.sleep(WAIT)


def _describe(folder: Path, source: Path, format: Format, files: list[File]) -> None:
    info = {"source": str(source.resolve()), "format": format.name, "files": len(files)}
    if format.ranks:
        info["ranks"] = {str(file.rank): file.path.name for file in files}
    write_run(folder, info)
    if not (folder / "attempts").exists():
        begin_attempt(folder, 0)


def _report(work: Import, format: Format, files: int) -> Report:
    return Report(format.name, files, work.count, work.rejected.count, work.rejected.quotes, work.notes)


def _nothing(source: Path, format: Format, rejected: Rejected) -> str:
    return f"{source}: none of {rejected.count} records is a rollout of {format.name}; the first: {rejected.quotes[0]}"
