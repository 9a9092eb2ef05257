"""Writing files on this machine that readers see whole or not at all."""

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
    """Opens a hidden file beside ``path`` that takes its name once all of it is on disk.

    The hidden file has a name of its own, so that two processes which write the same file do not write into one.
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
    """Writes Parquet, compressed by zstd."""
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd")
