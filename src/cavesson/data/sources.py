"""Rows from files, folders and Hugging Face data sets, each with the place it comes from.

Values keep the types of the file: JSON numbers stay numbers, and dates stay text. CSV has no types, so all its values
are text.
"""

import csv
import glob
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from cavesson.config_paths import expanded
from cavesson.data.fields import Row, brief
from cavesson.data.lmflow import instances, is_lmflow
from cavesson.data.settings import SourceSettings
from cavesson.errors import UserError, first_line

_Bytes = gzip.GzipFile | io.BufferedReader


def read(source: SourceSettings, *, stream: bool = False) -> Iterator[Row]:
    """Yield the rows of a source in order.

    Files are read row by row, except .json, which must be read whole. With `stream`, a Hub data set is read while it is
    downloaded.

    Raises:
        UserError: the source does not exist, a file does not have the format of its suffix, or a row is not an object.
    """
    if source.path is None:
        raise UserError("data.path is missing: give a file, a folder or a Hub data set")
    path = expanded(source.path)
    if source.subset is not None and path.exists():
        raise UserError(f"{source.path}: data.subset has no effect on files; it is for data sets of the Hub")
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():  # saved by `datasets`
        yield from _from_disk(path, source.split)
    elif files := _files(source.path, source.split):
        for file in files:
            yield from _from_file(file)
    else:
        yield from _from_hub(source, stream)


def _files(path: str, split: str) -> list[Path]:
    """Return the data files that a path refers to, or none if it must be the name of a data set."""
    file = expanded(path)
    if file.is_dir() and not _kind(file):
        return _of_split(_one_kind(file), split, path)
    if file.is_file() or (_kind(file) and not glob.has_magic(path)):
        if not _kind(file):
            raise UserError(f"{path}: the name of a data file must end in {_KINDS}")
        return _of_split([file], split, path)
    if not glob.has_magic(path):
        return []
    found = sorted(Path(name) for name in glob.glob(str(file), recursive=True) if Path(name).is_file())
    if not found or not all(map(_kind, found)):
        raise UserError(f"{path}: no file matches, or one of them does not end in {_KINDS}")
    return _of_split(found, split, path)


def _one_kind(folder: Path) -> list[Path]:
    """Return the data files of a folder, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and _kind(file))
    kinds = sorted({_kind(file) for file in files})
    if len(kinds) > 1:
        raise UserError(
            f"{folder} contains {' and '.join(kinds)} files; choose some of them, such as {folder / ('*' + kinds[0])}"
        )
    return files


def _of_split(files: list[Path], split: str, path: str) -> list[Path]:
    """Return the files of one split, if files are named after their splits. Files without splits are `train`."""
    named = {file: name for file in files if (name := _split_in(file))} if len(files) > 1 else {}
    if not named and split != "train" and files:
        raise UserError(f"{path} has no splits, so there is no {split!r}; give the path of those rows instead")
    if not named:
        return files
    if len(named) < len(files):
        other = next(file for file in files if file not in named)
        raise UserError(f"{path}: some files are named after a split and {other.name} is not; choose with a glob")
    wanted = [file for file, name in named.items() if name == _SPLITS.get(split, split)]
    if not wanted:
        raise UserError(f"{path} has no files of the split {split!r}; it has {', '.join(sorted(set(named.values())))}")
    return wanted


def _split_in(file: Path) -> str | None:
    words = re.split("[^a-z]+", file.name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), None)


def _kind(file: Path) -> str:
    """Return the suffix that determines how a file is read, without .gz, or "" if the suffix is not supported."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [".gz"]:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _READERS else ""


def _from_file(file: Path) -> Iterator[Row]:
    kind = _kind(file)
    try:
        open_ = gzip.open if file.suffix.lower() == ".gz" else open
        with open_(file, "rb") as content:
            yield from _READERS[kind](content, str(file))
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{file}: there is no such file") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"{file} is not UTF-8: it contains the byte {byte:#x}; convert it, for example with: iconv "
            "-f latin1 -t utf-8"
        ) from None
    except (OSError, ValueError, RecursionError, csv.Error, EOFError, zlib.error) as error:
        # Errors of Arrow, JSON and Unicode are ValueErrors; those of gzip are OSErrors.
        raise UserError(f"{file} cannot be read as {kind}: {first_line(error)}") from None


def _text_lines(content: _Bytes) -> Iterator[tuple[int, str]]:
    """Yield non-blank lines with their numbers. Only line breaks end a line: U+2028 may occur inside a text."""
    for number, line in enumerate(io.TextIOWrapper(content, encoding="utf-8-sig"), start=1):
        if line.strip():
            yield number, line.rstrip("\n")


def _read_txt(content: _Bytes, file: str) -> Iterator[Row]:
    for number, line in _text_lines(content):
        yield Row(f"{file} line {number}", {"text": line})


def _read_jsonl(content: _Bytes, file: str) -> Iterator[Row]:
    for number, line in _text_lines(content):
        place = f"{file} line {number}"
        try:
            value = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{place}: expected one JSON object per line: {error}") from None
        yield Row(place, _object(value, place))


def _read_json(content: _Bytes, file: str) -> Iterator[Row]:
    """Yield rows from a list of objects, from concatenated objects, or from the instances of an LMFlow file."""
    number = 0
    for value in _json_values(content.read().decode("utf-8-sig").strip()):
        format, rows = instances(value, file) if is_lmflow(value) else (None, value)
        for row in rows if isinstance(rows, list) else [rows]:
            number += 1
            place = f"{file} row {number}"
            yield Row(place, _object(row, place), format)


def _json_values(text: str) -> Iterator[Any]:
    at = 0
    while at < len(text):
        value, at = _JSON.raw_decode(text, at)
        yield value
        while at < len(text) and text[at].isspace():
            at += 1


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{place}: expected an object, such as {{"prompt": "…"}}, and not {brief(value)}')
    # JSON can contain half of a surrogate pair, which no tokenizer or file accepts.
    if _HALF_PAIR.search(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{place} contains half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return value


def _read_csv(content: _Bytes, file: str) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default refuses texts over 128 KiB
    lines = csv.reader(io.TextIOWrapper(content, encoding="utf-8-sig", newline=""), strict=True)
    names = next(lines, [])
    if not names or len(set(names)) < len(names):
        raise ValueError("the first line must name the columns, each with a different name")
    for number, values in enumerate(filter(None, lines), start=1):
        place = f"{file} row {number}"
        if len(values) != len(names):
            raise UserError(
                f"{place} (ends in line {lines.line_num}) has {len(values)} values for {len(names)} columns"
            )
        yield Row(place, dict(zip(names, values, strict=True)))


def _read_parquet(content: _Bytes, file: str) -> Iterator[Row]:
    # Parquet is read from its end, which gzip can reach only by decompressing everything.
    whole = io.BytesIO(content.read()) if isinstance(content, gzip.GzipFile) else content
    rows = chain.from_iterable(batch.to_pylist() for batch in pq.ParquetFile(whole).iter_batches())
    for number, values in enumerate(rows, start=1):
        yield Row(f"{file} row {number}", values, padded=True)


_JSON = json.JSONDecoder()
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_READERS: dict[str, Callable[[_Bytes, str], Iterator[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
_KINDS = ", ".join(_READERS) + ", or one of them and .gz"
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}


def _from_disk(path: Path, split: str) -> Iterator[Row]:
    import datasets  # slow to import, and not needed for files

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as a saved data set: {first_line(error)}") from None
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise UserError(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]
    elif split not in ("train", str(loaded.split)):
        raise UserError(f"{path} has no splits, so there is no {split!r}; give the path of those rows instead")
    for number, values in enumerate(loaded, start=1):
        yield Row(f"{path} row {number}", values, padded=True)


def _from_hub(source: SourceSettings, stream: bool) -> Iterator[Row]:
    import datasets

    assert source.path is not None
    try:
        loaded = datasets.load_dataset(source.path, source.subset, split=source.split, streaming=stream)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{source.path} is neither a file ({_KINDS}) nor a data set that can be loaded "
            f"(split {source.split!r}, subset {source.subset or 'none'}): {first_line(error)}"
        ) from error
    for number, values in enumerate(loaded, start=1):
        yield Row(f"{source.path} ({source.split}) row {number}", values, padded=True)
