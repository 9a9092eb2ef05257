"""Find the files of a source that belong to a format, and detect the format of a source."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from cavesson.errors import UserError
from cavesson.importers.reading import SEALED, WANDB_TABLE, File, Record, in_order, parse
from cavesson.importers.rollout import Broken, Format

MAX_RANK = 9999
MAX_PROCESSES = 2**15
"""More files than that are not one per process."""
OTHER_KINDS = (".gz", ".zst", ".xz", ".zip", ".json")
LOOK_AT_FILES = 50
LOOK_AT_RECORDS = 20
SHOWN = 5


def files_of(source: Path, format: Format, missing_ok: bool = False) -> list[File]:
    """Return the files of ``source``, which is one file or a folder, ordered by name.

    Raises:
        UserError: There are none and ``missing_ok`` is false.
    """
    paths = [source] if source.is_file() else _matching(source, format)
    if not paths and not missing_ok:
        patterns = " or ".join(format.patterns)
        raise UserError(f"{source} has no files like {patterns} ({format.what}): give their folder, or one file")
    if not format.ranks or len(paths) > MAX_PROCESSES:
        return [File(path) for path in in_order(paths)]
    return [File(path, rank) for rank, path in _ranks(in_order(paths)).items()]


def _matching(folder: Path, format: Format) -> list[Path]:
    for pattern in format.patterns:
        found = [path for path in folder.glob(pattern) if path.is_file() and path.suffix != ".tmp"]
        if paths := list({_plain(path): path for path in found}.values()):
            # Each of these tables includes the rows of the earlier ones.
            return in_order(paths)[-1:] if pattern.endswith(WANDB_TABLE) else paths
    return []


def _plain(path: Path) -> Path:
    """Return the name of a file before compression; during compression, both files exist."""
    return path.with_suffix("") if path.suffix == SEALED else path


def _ranks(paths: list[Path]) -> dict[int, Path]:
    """Return files by rank: the last number in each file name if these are unique, otherwise the index of the file."""
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", path.stem))]
    if paths and len(set(numbers)) == len(paths) and max(numbers) <= MAX_RANK:
        return dict(sorted(zip(numbers, paths, strict=True)))
    return dict(enumerate(paths))


def recognise(source: Path, formats: Iterable[Format], otherwise: Format) -> Format:
    """Return the one of ``formats`` that matches the files' first readable records, or ``otherwise`` if only it does.

    Raises:
        UserError: No format matches, or more than one of ``formats`` does.
    """
    found = [format for format in formats if _is(source, format)]
    if not found and _is(source, otherwise):
        return otherwise
    if len(found) == 1:
        return found[0]
    names = [format.name for format in found]
    if found:
        raise UserError(f"{source} can be {' or '.join(names)}: choose one with --format {names[0]}")
    raise UserError(
        f"{source} is not in a known format{_first_keys(source)}; known: {', '.join(f.name for f in formats)}\n"
        "for any other table, name the columns: --map prompt=question --map response=answer --map reward=score"
    )


def _is(source: Path, format: Format) -> bool:
    files = files_of(source, format, missing_ok=True)
    return any(format.recognises(record) for file in files[:LOOK_AT_FILES] for record in _first(file.path))


def _first(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the first record of a file that is an object, if there is one among its first records."""
    try:
        for record in islice(File(path).read(last=True), LOOK_AT_RECORDS):
            if (content := _content(record)) is not None:
                yield content
                return
    except (OSError, ValueError):
        return


def _content(record: Record) -> Mapping[str, Any] | None:
    if isinstance(record.content, bytes):
        try:
            content = parse(record.content)
        except Broken:
            return None
        return content if isinstance(content, dict) else None
    return record.content


def _first_keys(source: Path) -> str:
    paths = [source] if source.is_file() else in_order([*source.glob("*.jsonl"), *source.glob("*.parquet")])
    for path in paths[:LOOK_AT_FILES]:
        for record in _first(path):
            return f" ({path.name} begins with the keys {', '.join(map(str, list(record)[:12]))})"
    if not paths:
        return f": it has no .jsonl or .parquet files{_elsewhere(source)}"
    return f": {paths[0].name} does not begin with a JSON object on one line, nor with the rows of a Parquet table"


def _elsewhere(folder: Path) -> str:
    """Return where files that can be imported may be: in folders inside, or in files of another kind."""
    entries = in_order([*folder.iterdir()])
    inside = [path.name for path in entries if path.is_dir() and _has_records(path)]
    if inside:
        return f"; import one of the folders in it: {', '.join(inside[:SHOWN])}"
    others = [path.name for path in entries if path.name.endswith(OTHER_KINDS)]
    return f"; unpack {others[0]}, or write it as JSON Lines, an object on each line" if others else ""


def _has_records(folder: Path) -> bool:
    return any(path.suffix in (".jsonl", ".parquet") for path in folder.iterdir())
