"""Storage of a run's files: a local folder, or a location that fsspec can access, such as s3://bucket/run."""

import hashlib
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from cavesson.errors import UserError, first_line
from cavesson.object_storage import checked_url
from cavesson.record.files import replacing

ATTEMPTS = 10
"""Attempts per request to S3; with the pauses between them, they take about a minute."""
SETTLED = 2 * 10**9
"""Nanoseconds after which a folder's time tells it from any other state."""


class Storage(Protocol):
    """The files of one run, addressed by names relative to it, such as ``record/rows-00000012-0000-0000.parquet``."""

    root: str

    def __hash__(self) -> int: ...

    @property
    def filesystem(self) -> Any:
        """The fsspec file system that DuckDB needs to read the files; None for a local folder."""

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, unordered; a folder that does not exist counts as empty."""

    def exists(self, name: str) -> bool: ...

    def size(self, name: str) -> int:
        """Return the size in bytes; raise FileNotFoundError if the file does not exist."""

    def modified(self, name: str) -> float:
        """Return when a file was last modified, in seconds since 1970."""

    def state(self, folders: Sequence[str]) -> tuple[int, ...] | None:
        """Return a value that changes whenever a name is added to, removed from or replaced in one of the folders.

        None if changes cannot be detected reliably, as right after one happened.
        """

    def path(self, name: str) -> str:
        """Return the path or URL at which DuckDB and other readers find the file."""

    def read(self, name: str) -> bytes: ...

    def parquet(self, name: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        """Open a Parquet file; pass its ``metadata`` if known, so that it is not read again."""

    def writing(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file that becomes visible to readers when the block ends, and never if the block fails."""

    def growing(self, name: str) -> Path | None:
        """Return the local path of a file that can grow; None if files can only be written as a whole."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a new file; return False, without writing, if it already exists."""

    def delete(self, name: str) -> None:
        """Remove a file; a file that does not exist is not an error."""

    def lock_file(self) -> Path:
        """Return the local file that processes on this machine lock while they write this run."""


Location = Path | str | Storage
"""A folder, a URL, or what was made of one."""


def storage(location: Location) -> Storage:
    """Return the storage of a run; a storage object is returned unchanged.

    Raises:
        UserError: The URL is not one of object storage, or the package that reads it is not installed.
    """
    if isinstance(location, str) and "://" in location:
        return Remote(checked_url(location))
    return Folder(Path(location)) if isinstance(location, str | Path) else location


@contextmanager
def reaching(location: Location) -> Iterator[None]:
    """Convert errors of the library that accesses a location to a UserError; each library raises its own exceptions."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if isinstance(location, Path):
            raise
        name = location if isinstance(location, str) else location.root
        raise UserError(f"{name} cannot be reached: {first_line(error)}") from error


def check_new_record(url: str) -> None:
    """Check that a record can begin at a URL, by creating a file; nothing created for the test remains.

    Raises:
        UserError: The package for the URL is not installed, the storage cannot be reached or refuses, or there is a
            run already.
    """
    files, name = storage(url), f".writable-{secrets.token_hex(8)}"
    with reaching(url):
        if files.exists("run.json"):
            raise UserError(f"{url} already contains the record of a run; choose another place with --record")
        files.create(name, b"")
        files.delete(name)


def small_table(files: Storage, name: str) -> pa.Table:
    """Read a small Parquet file in one piece."""
    with _naming(files.path(name)):
        return pq.ParquetFile(pa.BufferReader(files.read(name))).read()


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Name the file in the error if it is broken."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a complete Parquet file: {first_line(error)}") from error


class Folder:
    """A local folder. The folder may come from a stranger: nothing in it leads out of it, or to a device or a pipe."""

    filesystem = None

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)
        self._folder = folder

    def names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._at(folder))
        except FileNotFoundError:
            return []

    def exists(self, name: str) -> bool:
        return self._at(name).is_file()

    def size(self, name: str) -> int:
        return self._at(name).stat().st_size

    def modified(self, name: str) -> float:
        return self._at(name).stat().st_mtime

    def state(self, folders: Sequence[str]) -> tuple[int, ...] | None:
        try:
            times = tuple(self._at(folder).stat().st_mtime_ns for folder in folders)
        except FileNotFoundError:
            return None
        # Two changes in quick succession may have the same timestamp.
        return times if time.time_ns() - max(times) > SETTLED else None

    def path(self, name: str) -> str:
        return str(self._at(name))

    def read(self, name: str) -> bytes:
        return self._at(name).read_bytes()

    def parquet(self, name: str, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
        with _naming(self.path(name)):
            return pq.ParquetFile(self._at(name), metadata=metadata)

    def writing(self, name: str) -> AbstractContextManager[BinaryIO]:
        return replacing(self._at(name))

    def growing(self, name: str) -> Path:
        return self._at(name)

    def create(self, name: str, content: bytes) -> bool:
        try:
            with self._at(name).open("xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        self._at(name).unlink(missing_ok=True)

    def lock_file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._at(".lock")
        return self._folder.resolve() / ".lock"

    def _at(self, name: str) -> Path:
        """Return the path of a file or folder inside this one, which need not exist.

        Raises:
            UserError: A link leads out of the folder, or there is something else than a file or a folder.
        """
        path = self._folder
        for part in name.split("/"):
            if part == "..":
                raise UserError(f"{self.root} names the file {name!r}, which is outside of it")
            path = path / part
            try:
                mode = os.lstat(path).st_mode
            except (FileNotFoundError, NotADirectoryError):
                continue
            if stat.S_ISLNK(mode):
                _check_link(path, self._folder)
            elif not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise UserError(f"{path} is neither a file nor a folder: remove it")
        return path


def _check_link(link: Path, folder: Path) -> None:
    """Raise UserError if a link leads out of a folder, or to something else than a file or a folder."""
    target = os.path.realpath(link)
    if not Path(target).is_relative_to(os.path.realpath(folder)):
        raise UserError(f"{link} is a link that leads out of {folder}: put the file itself there if you trust it")
    if os.path.lexists(target) and not os.path.isfile(target) and not os.path.isdir(target):
        raise UserError(f"{link} is a link to something that is neither a file nor a folder: remove it")


class Remote:
    """A location accessed through fsspec; an object appears only once its upload is complete."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec

            # Files that another process wrote must be visible, so directory listings must not be cached.
            self.filesystem, base = fsspec.core.url_to_fs(url.rstrip("/"), use_listings_cache=False, **_retries(url))
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
        try:  # `isfile` and `exists` of a file system may take any error for an absent file
            return bool(self.filesystem.info(self._at(name))["type"] == "file")
        except FileNotFoundError:
            return False

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
        # Uploaded only when complete, so that an error or a kill leaves nothing behind.
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            self.filesystem.put_file(file.name, self._at(name))

    def growing(self, name: str) -> None:
        return None

    def create(self, name: str, content: bytes) -> bool:
        try:
            self.filesystem.pipe_file(self._at(name), content, mode="create")  # a conditional write
        except FileExistsError:
            # If the response to the first attempt was lost, the second one finds its own file.
            return self.read(name) == content
        return True

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.filesystem.rm_file(self._at(name))

    def lock_file(self) -> Path:
        return Path(tempfile.gettempdir()) / f"cavesson-{hashlib.sha256(self.root.encode()).hexdigest()[:16]}.lock"

    def _at(self, name: str) -> str:
        return f"{self._base}/{name}"


def _retries(url: str) -> dict[str, Any]:
    """Return the options of a file system that repeat failed requests for a minute; those of the user come first."""
    import fsspec

    if not url.startswith(("s3://", "s3a://")) or "AWS_MAX_ATTEMPTS" in os.environ:
        return {}
    own = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
    return {"config_kwargs": {"retries": {"mode": "standard", "max_attempts": ATTEMPTS}, **own}}
