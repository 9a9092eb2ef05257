"""Writing files on this machine that readers see whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from dressage.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a hidden file beside ``path`` that takes its name once all of it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a hidden folder beside ``path`` that takes its name at the end, or goes if anything fails.

    Raises:
        UserError: ``path`` exists and is not an empty folder.
    """
    path = path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty folder: name a new one, or remove it first")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        shutil.rmtree(temporary)
        raise


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode())


def write_table(path: Path, table: pa.Table) -> None:
    """Writes Parquet, compressed by zstd."""
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")
