"""Write local files atomically: readers see the whole file or none."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a hidden file beside ``path`` that is renamed to ``path`` once it is completely on disk.

    The hidden file has a unique name, so that two processes that write the same path do not share a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False))


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file compressed with zstd."""
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")
