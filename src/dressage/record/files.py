"""The files of a run folder: their names, and writing that readers see whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from dressage.errors import UserError

Kind = Literal["rows", "tokens", "steps"]
TOKEN_ORDER = [("sample", "ascending"), ("position", "ascending")]
SEGMENT_NAME = re.compile(r"(rows|tokens|steps)-(\d{8,})-(\d{4,})-(\d{4,})\.parquet")


def segment_path(folder: Path, kind: Kind, step: int, attempt: int, rank: int) -> Path:
    return folder / "record" / f"{kind}-{step:08d}-{attempt:04d}-{rank:04d}.parquet"


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
    """Writes Parquet: zstd; float token columns byte by byte, because their noise defeats a dictionary."""
    layout: dict[str, Any] = {}
    if path.name.startswith("tokens-"):
        encodings = {f.name: "BYTE_STREAM_SPLIT" for f in table.schema if pa.types.is_floating(f.type)}
        encodings["position"] = "DELTA_BINARY_PACKED"
        dictionary = [name for name in table.column_names if name not in encodings]
        layout = {"column_encoding": encodings, "use_dictionary": dictionary}
    with replacing(path) as file:
        pq.write_table(table, file, compression="zstd", **layout)


def write_segment(folder: Path, step: int, attempt: int, rank: int, rows: pa.Table, tokens: pa.Table) -> None:
    """Writes one rank's rollouts of one step, or adds to them.

    The rows file comes last, and its appearing commits the rollouts: tokens without a row do not count.
    """
    rows_path = segment_path(folder, "rows", step, attempt, rank)
    tokens_path = segment_path(folder, "tokens", step, attempt, rank)
    if rows_path.exists():
        rows = _union(pq.ParquetFile(rows_path).read(), rows)
        tokens = _union(pq.ParquetFile(tokens_path).read(), tokens).sort_by(TOKEN_ORDER)
    write_table(tokens_path, tokens)
    write_table(rows_path, rows)


def _union(first: pa.Table, second: pa.Table) -> pa.Table:
    return pa.concat_tables([first, second], promote_options="permissive")


def write_run(folder: Path, info: Mapping[str, Any]) -> None:
    """Writes ``run.json``: the resolved config, versions, and whatever else describes the whole run."""
    write_json(folder / "run.json", info)


def write_vocabulary(folder: Path, tokens: Sequence[str], texts: Sequence[str]) -> None:
    """Writes ``vocabulary.parquet``, which turns token ids back into text.

    Args:
        folder: Run folder.
        tokens: [V] the tokenizer's own string of each id, such as ``Ġthe``.
        texts: [V] the text of each id, such as `` the``.
    """
    ids = pa.array(range(len(tokens)), pa.int32())
    columns = [ids, pa.array(tokens, pa.string()), pa.array(texts, pa.string())]
    write_table(folder / "vocabulary.parquet", pa.table(columns, names=["token_id", "token", "text"]))


def begin_attempt(folder: Path, start_step: int) -> int:
    """Notes that the run starts, or starts again, at ``start_step``, and returns the attempt's number.

    What earlier attempts recorded at ``start_step`` and later stays on disk and is no longer read. One process calls
    this and tells the others.
    """
    attempt = max((a for a, _ in attempts(folder)), default=-1) + 1
    started = datetime.now(UTC).isoformat(timespec="seconds")
    content = {"attempt": attempt, "start_step": start_step, "started": started}
    write_json(folder / "attempts" / f"{attempt:04d}.json", content)
    return attempt


def attempts(folder: Path) -> list[tuple[int, int]]:
    """Returns (attempt, start step) of every attempt, in order."""
    paths = sorted((folder / "attempts").glob("[0-9]*.json"))
    contents = [json.loads(path.read_bytes()) for path in paths]
    return [(content["attempt"], content["start_step"]) for content in contents]
