"""Where a run's files are: a folder on this machine, or a place that fsspec reaches, such as s3://bucket/run."""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from cavesson.errors import UserError, first_line
from cavesson.record.files import replacing

SETTLED = 2 * 10**9
"""Nanoseconds after which a folder's time tells it from any other state."""


class Storage(Protocol):
    """The files of one run by their names below it, such as ``record/rows-00000012-0000-0000.parquet``."""

    root: str

    def __hash__(self) -> int: ...

    @property
    def filesystem(self) -> Any:
        """The fsspec file system that DuckDB needs to read here; None on this machine."""

    def names(self, folder: str) -> list[str]:
        """Names of what is in a folder, in no order; a folder that is not there is empty."""

    def exists(self, name: str) -> bool: ...

    def size(self, name: str) -> int:
        """Bytes; FileNotFoundError if there is no such file."""

    def modified(self, name: str) -> float:
        """When a file was written, in seconds since 1970."""

    def state(self, folders: Sequence[str]) -> tuple[int, ...] | None:
        """Returns what is another as soon as a name is added to, removed from or replaced in a folder.

        None if that cannot be told, as while it has just happened.
        """

    def path(self, name: str) -> str:
        """Where DuckDB and other readers find the file."""

    def read(self, name: str) -> bytes: ...

    def parquet(self, name: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        """Opens a file; its ``metadata``, if they are known, need not be read again."""

    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file that readers see once the block has ended, and never if it fails."""

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file that is not there yet; returns False, and writes nothing, if it is."""

    def delete(self, name: str) -> None:
        """Removes a file; one that is not there is no mistake."""

    def lock_file(self) -> Path:
        """Returns the file of this machine that the processes of this machine lock when they write here."""


Place = Path | str | Storage
"""A folder, a URL, or what was made of one."""


def storage(place: Place) -> Storage:
    """Returns the storage of a run; one that is a storage already is returned as it is.

    Raises:
        UserError: The URL's protocol is unknown, or what reads it is not installed.
    """
    if isinstance(place, str) and "://" in place:
        return Remote(place)
    return Folder(Path(place)) if isinstance(place, str | Path) else place


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Says which file it is that is broken."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is no whole Parquet file: {first_line(error)}") from error


class Folder:
    """A folder on this machine."""

    filesystem = None

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self._folder = folder

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._folder / folder)
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        return (self._folder / name).is_file()

    def size(self, name: str) -> int:
        return (self._folder / name).stat().st_size

    def modified(self, name: str) -> float:
        return (self._folder / name).stat().st_mtime

    def state(self, folders: Sequence[str]) -> tuple[int, ...] | None:
        try:
            times = tuple((self._folder / folder).stat().st_mtime_ns for folder in folders)
        except FileNotFoundError:
            return None
        # Two changes in quick succession may have the same time.
        return times if time.time_ns() - max(times) > SETTLED else None

    def path(self, name: str) -> str:
        return str(self._folder / name)

    def read(self, name: str) -> bytes:
        return (self._folder / name).read_bytes()

    def parquet(self, name: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        with _naming(self.path(name)):
            return pq.ParquetFile(self._folder / name, metadata=metadata)

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        return replacing(self._folder / name)

    def create(self, name: str, content: bytes) -> bool:
        try:
            with (self._folder / name).open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)

    def lock_file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder.resolve() / ".lock"


class Remote:
    """A place that fsspec reaches; an object is there whole once it is uploaded."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            # What another process wrote must be seen, so nothing about it may be remembered.
            self.filesystem, base = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False)
        except ImportError as error:
            hint = "; try pip install 'cavesson[s3]'" if url.startswith("s3:") else ""
            raise UserError(f"{url} cannot be reached: {error}{hint}") from error
        except ValueError as error:
            raise UserError(f"{url} cannot be reached: {error}") from error
        self.root = url.rstrip("/")
        self._base = base
        self._arrow = pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(self.filesystem))

    def names(self, folder: str) -> list[str]:
        try:
            found = self.filesystem.ls(self._at(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rsplit("/", 1)[-1] for path in found]

    def exists(self, name: str) -> bool:
        return bool(self.filesystem.isfile(self._at(name)))

    def size(self, name: str) -> int:
        return int(self.filesystem.size(self._at(name)))

    def modified(self, name: str) -> float:
        return float(self.filesystem.modified(self._at(name)).timestamp())

    def state(self, folders: Sequence[str]) -> None:
        return None

    def path(self, name: str) -> str:
        return str(self.filesystem.unstrip_protocol(self._at(name)))

    def read(self, name: str) -> bytes:
        return bytes(self.filesystem.cat_file(self._at(name)))

    def parquet(self, name: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        with _naming(self.path(name)):
            return pq.ParquetFile(self._at(name), metadata=metadata, filesystem=self._arrow, pre_buffer=True)

    @contextmanager
    def writing(self, name: str) -> Iterator[IO[bytes]]:
        # Uploaded only when it is whole, so that an error or a kill on the way leaves nothing.
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            self.filesystem.put_file(file.name, self._at(name))

    def create(self, name: str, content: bytes) -> bool:
        try:
            self.filesystem.pipe_file(self._at(name), content, mode="create")  # a conditional write
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        try:
            self.filesystem.rm_file(self._at(name))
        except FileNotFoundError:
            return

    def lock_file(self) -> Path:
        return Path(tempfile.gettempdir()) / f"cavesson-{hashlib.sha256(self.root.encode()).hexdigest()[:16]}.lock"

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"
