"""Read files as records: JSON lines, and tables a few rows at a time. The files may still be being written."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cavesson.importers.archives import ARCHIVES, archive_rows
from cavesson.importers.databases import database_rows, inside
from cavesson.importers.rollout import NO_NAMES, Broken, Names

BUFFER = 1 << 20
"""Bytes that are read at once."""
LONGEST = 32 << 20
"""Bytes of the longest line that is read; as Python objects a line takes up to forty times as much."""
REMEMBERED = 1024
"""Bytes before the place from which a file is read on; where they are others, the file was written anew."""
WANDB_TABLE = ".table.json"
TABLES = (".parquet", WANDB_TABLE, *ARCHIVES)
"""Ends of the names of files that are read as a whole."""
SEALED = {".zst": "zstd", ".gz": "gzip"}
"""Ends the name of a file of lines once nothing is added to it any more and it was compressed."""
_PAIR = re.compile(rb'"\s*:')
"""The end of a key; texts may hold or begin with what looks like one."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"(\s*:)?')
"""A whole key or text, several times slower; the group is there for a key only."""
_NESTED = (dict, list)


class Record(NamedTuple):
    """One record of a file: an unparsed line, or a row as a dictionary."""

    line: int
    offset: int
    size: int
    content: bytes | dict[str, Any] | None
    """None if it could not be read."""
    problem: str = ""
    """Why it could not be read."""


class File:
    """One file, read as far as it is complete; ``read`` resumes where the last call stopped.

    If the file was replaced by its compressed version, that is read from the same line on. Lines are read that begin at
    the byte offset ``start`` or later, and before ``stop``. ``names`` may say the step of the file, and ``rank`` is
    that of the process that wrote it.
    """

    def __init__(
        self,
        path: Path,
        rank: int | None = None,
        names: Names = NO_NAMES,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.path = unsealed(path)
        self.rank = rank
        self.names = names
        self._offset = start
        self._stop = stop
        self._line = 0
        self._done = False
        self._before = b""

    @property
    def lines(self) -> int:
        """The number of lines, or rows, read so far."""
        return self._line

    @property
    def is_table(self) -> bool:
        return self.path.name.endswith(TABLES) or inside(self.path) is not None

    def parts(self, size: int) -> Iterator["File"]:
        """Yield parts of about ``size`` bytes of a file of lines, which can be read separately."""
        if self._is_sealed():
            yield self
            return
        start, end = 0, self._end()
        while start < end:
            try:
                stop = _end_of_line(self.path, start + size) if start + size < end else end
            except OSError:
                stop = end  # reading the file will report why it cannot be read
            yield File(self.path, self.rank, self.names, start, stop)
            start = stop

    def grown(self) -> bool:
        """Whether the file may contain something new."""
        return not self._done and (self._is_sealed() or self._end() > self._offset)

    def rewritten(self) -> bool:
        """Whether the file was rewritten since it was last read."""
        if self._done or self._end() == self._offset or self._is_sealed():
            return False
        if self._end() < self._offset:
            return True
        try:
            with self.path.open("rb") as file:
                return self._bytes_before(file) != self._before
        except FileNotFoundError:
            return False

    def _bytes_before(self, file: BinaryIO) -> bytes:
        start = max(self._offset - REMEMBERED, 0)
        file.seek(start)
        return file.read(self._offset - start)

    def size(self) -> int:
        """Return the number of bytes left to read."""
        return max((self._end() if self._stop is None else self._stop) - self._offset, 0)

    def _end(self) -> int:
        with suppress(FileNotFoundError, NotADirectoryError):
            return (_sealed(self.path) or self.path).stat().st_size
        return 0

    def _is_sealed(self) -> bool:
        return _sealed(self.path) is not None

    def read(self, last: bool) -> Iterator[Record]:
        """Yield the complete new records; the ``last`` time, an unterminated last line counts as a line, too.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is a broken table and ``last`` is true; otherwise, it may still be being written and
                has no records yet.
        """
        if self.is_table:
            yield from self._rows(last)
        else:
            yield from self._lines(last)

    def _rows(self, last: bool) -> Iterator[Record]:
        if self._done:
            return
        try:
            rows = _rows_of(self.path)
            for row in islice(rows, self._line, None):  # a table that could not be read to its end is tried again
                self._line += 1
                yield Record(self._line, 0, 0, *((None, row) if isinstance(row, str) else (row,)))
        except ValueError:
            if last:
                raise
            return
        self._done = True

    def _lines(self, last: bool) -> Iterator[Record]:
        if (sealed := _sealed(self.path)) is not None:
            if not self._done:
                stream = pa.input_stream(sealed, compression=SEALED[sealed.suffix])
                with io.BufferedReader(stream, BUFFER) as file:
                    _skip(file, self._offset)
                    yield from self._lines_of(file, last=True)
                self._done = True
            return
        with self.path.open("rb", buffering=BUFFER) as file:
            file.seek(self._offset)
            try:
                yield from self._lines_of(file, last)
            finally:
                self._before = self._bytes_before(file)

    def _lines_of(self, file: BinaryIO, last: bool) -> Iterator[Record]:
        while (self._stop is None or self._offset < self._stop) and (line := file.readline(LONGEST)):
            size, whole = len(line), line.endswith(b"\n")
            content: bytes | None = line.removesuffix(b"\n")
            if not whole and size == LONGEST:
                more, whole = _skip_line(file)
                size, content = size + more, None
            if not whole and not last:
                return
            problem = f"the line is longer than {LONGEST >> 20} MiB, the limit" if content is None else ""
            record = Record(self._line + 1, self._offset, size - whole, content, problem)
            self._line += 1
            self._offset += size
            yield record


def readable(file: File, last: bool, unreadable: Callable[[str], None]) -> Iterator[Record]:
    """Yield the records of a file, as far as it can be read.

    If it is not the ``last`` time, the file may be readable at the next poll; else ``unreadable`` is called with the
    reason if it cannot be read.
    """
    try:
        yield from file.read(last)
    except (OSError, ValueError) as error:
        if last:
            unreadable(f"the file cannot be read: {str(error)[:200]}")


def _end_of_line(path: Path, place: int) -> int:
    """Return the offset after the end of the line that contains the byte before ``place``."""
    with path.open("rb", buffering=BUFFER) as file:
        file.seek(place - 1)
        return place - 1 + _skip_line(file)[0]


def _skip_line(file: BinaryIO) -> tuple[int, bool]:
    """Skip the rest of a line; return the number of skipped bytes and whether the line was terminated."""
    size = 0
    while part := file.readline(BUFFER):
        size += len(part)
        if part.endswith(b"\n"):
            return size, True
    return size, False


def unsealed(path: Path) -> Path:
    """Return the name of a file before compression; during compression, both files exist."""
    return path.with_suffix("") if path.suffix in SEALED else path


def _sealed(path: Path) -> Path | None:
    """Return the compressed version of a file, if only that exists."""
    if path.exists():
        return None
    return next((sealed for end in SEALED if (sealed := path.with_name(path.name + end)).exists()), None)


def _skip(file: BinaryIO, size: int) -> None:
    """Skip the first ``size`` bytes of a file that does not support seeking."""
    while size and (part := file.read(min(size, BUFFER))):
        size -= len(part)


def _rows_of(path: Path) -> Iterator[dict[str, Any] | str]:
    if inside(path) is not None:
        return database_rows(path)
    if path.name.endswith(ARCHIVES):
        return archive_rows(path)
    return _parquet_rows(path) if path.suffix == ".parquet" else wandb_rows(path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any] | str]:
    """Yield the rows of a table; for a row that Python cannot represent, yield the reason instead."""
    with pq.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two columns are called {min(twice)!r}")
        size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups))
        for batch in file.iter_batches(batch_size=max(1, min(256, BUFFER * file.metadata.num_rows // max(size, 1)))):
            try:
                yield from _python_rows(batch)
            except (ValueError, OverflowError, RecursionError):
                for number in range(batch.num_rows):
                    try:
                        yield from _python_rows(batch.slice(number, 1))
                    except (ValueError, OverflowError, RecursionError) as problem:
                        yield (
                            "the row contains a value that Python cannot represent, such as a date: "
                            f"{str(problem)[:200]}"
                        )


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = batch.to_pylist(maps_as_pydicts="strict")
    except KeyError:
        rows = batch.to_pylist()  # a map with duplicate keys becomes a list of pairs
    return rows


def wandb_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table saved by Weights & Biases: ``{"columns": […], "data": [[…], …]}``."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply to be read") from None
    if not isinstance(content, dict) or not isinstance(content.get("columns"), list):
        raise ValueError("expected an object with columns and data")
    for row in content.get("data") or []:
        yield dict(zip(map(str, content["columns"]), row, strict=False)) if isinstance(row, list) else {"row": row}


def in_order(paths: list[Path]) -> list[Path]:
    """Sort paths by name, with numbers compared by value: 9.jsonl before 10.jsonl."""
    return sorted(paths, key=lambda path: [(len(p) * p.isdigit(), p) for p in re.split(r"(\d+)", str(path))])


def parse(line: bytes) -> Any:
    """Parse the JSON of a line. Integers beyond 64 bits become floats; see ``Inexact``.

    Raises:
        Broken: The line is not JSON, or an object has duplicate keys.
    """
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:
        return parse_exactly(line)
    if _has_twice(line, content):
        parse_exactly(line)
    return content


def _has_twice(line: bytes, content: Any) -> bool:
    """Whether a line has more key-value pairs than were parsed."""
    seen = len(_PAIR.findall(line))
    if isinstance(content, dict) and seen == len(content):
        return False
    keys = _keys(content)
    return seen != keys and sum(map(bool, _STRING.findall(line))) != keys


def _keys(content: Any) -> int:
    """Return the number of keys in all objects, however deeply nested."""
    count, left = 0, [content] if type(content) in _NESTED else []
    while left:
        one = left.pop()
        values = one
        if isinstance(one, dict):
            count += len(one)
            values = one.values()
        left += [value for value in values if type(value) in _NESTED]
    return count


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        times = Counter(key for key, _ in pairs)
        raise Broken(f"the key {next(key for key in times if times[key] > 1)!r} occurs twice")
    return content


def parse_exactly(line: bytes) -> Any:
    """Parse like ``parse``, but exactly and more slowly; NaN and infinities, which Python writes, are numbers.

    Raises:
        Broken: The line is not JSON, or an object has duplicate keys.
    """
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as problem:
        raise Broken(f"expected one JSON object per line: {str(problem)[:200]}") from problem
