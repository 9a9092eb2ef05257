"""Find the files of a source that belong to a format, and detect the format of a source."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from cavesson.errors import UserError
from cavesson.importers.databases import DATABASE, inside, places_in
from cavesson.importers.reading import TABLES, WANDB_TABLE, File, Record, in_order, parse, unsealed, wandb_rows
from cavesson.importers.rollout import Broken, Format, Names
from cavesson.importers.steps import run_of, step_in_names
from cavesson.importers.unknown import holding, unknown
from cavesson.text.counting import counted, some_of

MAX_RANK = 9999
MAX_PROCESSES = 2**15
"""More files than that are not one per process."""
RECORDS = (".jsonl", *TABLES)
"""Ends of the names of files that can be read."""
LOOK_AT = 20
"""Records of a file that show what it has, unless the first ones are large."""
LOOK_AT_BYTES = 1 << 20
LOOK_AT_FILES = 50
FOLDERS_ABOVE = 4
"""Names of folders, from the source's own upwards, that may say the step."""
_WANDB_FOLDER = "/files/media/"


class Source:
    """One file or a folder of files, of which each is examined once for the formats of its first records."""

    def __init__(self, path: Path, formats: Sequence[Format]) -> None:
        self.path = path
        self._formats = formats
        self._kinds: dict[Path, _Kinds] = {}
        self._is_folder = path.is_dir() or inside(path) is not None

    def recognise(self, otherwise: Format) -> Format:
        """Return the one format that matches the first records of files, or ``otherwise`` if only it does.

        Raises:
            UserError: No format matches, or more than one besides ``otherwise`` does.
        """
        paths = self._paths()
        kinds = {format.name: format for format in self._formats if self._of_format(format, paths)}
        found = [format for format in kinds.values() if format is not otherwise]
        if len(found) == 1 or (not found and kinds):
            return found[0] if found else otherwise
        if found:
            names = [format.name for format in found]
            raise UserError(f"{self.path} can be {' or '.join(names)}: choose one with --format {names[0]}")
        firsts = {path: next(first_records(path), None) for path in paths[:LOOK_AT_FILES]}
        raise UserError(unknown(self.path, _all_files(self.path), firsts, self._formats))

    def files(self, format: Format, missing_ok: bool = False) -> list[File]:
        """Return the files of a format, ordered by name, as far as they have rollouts or do not show what they have.

        Raises:
            UserError: There are none and ``missing_ok`` is false, or they are those of several runs.
        """
        paths = self._paths()
        chosen = self._of_format(format, paths) or self._undecided(format, paths)
        if not chosen and not missing_ok:
            wanted = " or ".join(format.patterns)
            held = holding(_all_files(self.path)) or "nothing"
            raise UserError(f"{self.path} has no files like {wanted} ({format.what}): it holds {held}")
        names = {path: self._names(path) for path in chosen}
        _check_runs(self.path, format, names.values())
        if not format.new_tables:
            chosen = _without_repeated(chosen)
        if not format.ranks or len(chosen) > MAX_PROCESSES:
            return [File(path, names=names[path]) for path in chosen]
        return [File(path, rank, names[path]) for rank, path in _ranks(chosen).items()]

    def notes(self, format: Format, files: Iterable[File]) -> list[str]:
        """Return a note on the files that were not read, and one on files of the same step in several folders."""
        read = {file.path for file in files}
        left = [self._names(path).inside for path in self._paths() if path not in read]
        notes = [f"{counted(len(left), 'file')} not read: {some_of(left)}"] if left else []
        if not format.one_run and (folders := _clashing([file.names for file in files])):
            notes.append(f"the same steps are in {counted(len(folders), 'folder')}: {some_of(folders)}")
        return notes

    def _paths(self) -> list[Path]:
        """Return the files that can be read, by their names before compression."""
        if not self._is_folder:
            return [unsealed(self.path)]
        found = {unsealed(path): path for path in _all_files(self.path)}
        databases = [self.path, *(path for path in found if path.suffix == DATABASE)]
        places = [place for path in databases for place in places_in(path)]
        return in_order([*(path for path in found if path.name.endswith(RECORDS)), *places])

    def _of_format(self, format: Format, paths: Sequence[Path]) -> list[Path]:
        for pattern in format.patterns if self._is_folder else ("*",):
            found = _matching(pattern, paths)
            if any(format.name in self._kind(path).whole for path in found):
                return [path for path in found if format.name in self._kind(path).like or path not in self._kinds]
        return []

    def _undecided(self, format: Format, paths: Sequence[Path]) -> list[Path]:
        """Return files that have nothing readable yet, or that a chosen format reads as broken records."""
        found = (_matching(pattern, paths) for pattern in (format.patterns if self._is_folder else ("*",)))
        return next(filter(None, found), [])

    def _kind(self, path: Path) -> "_Kinds":
        if path in self._kinds:
            return self._kinds[path]
        like: set[str] = set()
        for record in first_records(path):
            whole = {format.name for format in self._formats if format.recognises(record)}
            like |= whole | {format.name for format in self._formats if format.resembles(record)}
            self._kinds[path] = _Kinds(frozenset(whole), frozenset(like))
            if whole:
                break
        return self._kinds.get(path, _Kinds())

    def _names(self, path: Path) -> Names:
        folder = self.path.resolve() if self._is_folder else path.resolve().parent
        name = path.relative_to(self.path).as_posix() if self._is_folder else path.name
        return Names(name, "/".join(folder.parts[-FOLDERS_ABOVE:]))


class _Kinds(NamedTuple):
    """The names of formats that the first records of a file are in."""

    whole: frozenset[str] = frozenset()
    like: frozenset[str] = frozenset()
    """Those, and the formats that have one of the keys of these records."""


def _all_files(folder: Path) -> Iterator[Path]:
    """Yield all files in a folder, except those of run folders in it, which records of Cavesson are."""
    for name, inner, files in os.walk(folder, onerror=_refuse):
        if "run.json" in files and "record" in inner and Path(name) != folder:
            inner.clear()
            continue
        yield from (path for file in files if (path := Path(name, file)).suffix != ".tmp" and path.is_file())


def _refuse(error: OSError) -> None:
    """Report a folder that cannot be read; a place in a database, or what was deleted meanwhile, has no files."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise UserError(f"{error.filename} cannot be read: {error.strerror or error}") from error


def _matching(pattern: str, paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if any(map(path.match, pattern.split()))]


def first_records(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the objects among the first records of a file."""
    try:
        for record in islice(File(path).read(last=True), LOOK_AT):
            if (content := _content(record)) is not None:
                yield content
            if record.offset > LOOK_AT_BYTES:
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


def _check_runs(source: Path, format: Format, names: Iterable[Names]) -> None:
    names = list(names)
    wandb = {f"/{one.inside}".partition(_WANDB_FOLDER)[0][1:] for one in names if _WANDB_FOLDER in f"/{one.inside}"}
    runs = in_order([*map(Path, wandb)]) if len(wandb) > 1 else _clashing(names) if format.one_run else []
    if len(runs) > 1:
        raise UserError(
            f"{source} has rollouts of {len(runs)} runs, or of training and validation, in separate folders: "
            f"import one of them: {some_of(map(str, runs))}"
        )


def _clashing(names: Iterable[Names]) -> list[str]:
    """Return the folders that have files of the same step, or of the same name, as another one."""
    folders: defaultdict[object, set[str]] = defaultdict(set)
    for one in names:
        folder = run_of(one.inside)
        folders[one.inside.removeprefix(folder)].add(folder or ".")
        folders[step_in_names(one._replace(outside=""))].add(folder or ".")
    folders.pop(None, None)
    return sorted(set().union(*(found for found in folders.values() if len(found) > 1)))


def _without_repeated(paths: list[Path]) -> list[Path]:
    """Leave out the tables whose rows all come again at the beginning of the next one of the same name."""
    tables: defaultdict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in paths:
        if path.name.endswith(WANDB_TABLE):
            tables[path.parent, re.sub(r"_\d+_.*", "", path.name)].append(path)
    repeated = {old for found in tables.values() for old, new in pairwise(found) if _has(new, old)}
    return [path for path in paths if path not in repeated]


def _has(new: Path, old: Path) -> bool:
    try:
        earlier = list(wandb_rows(old))
        return list(islice(wandb_rows(new), len(earlier))) == earlier
    except (OSError, ValueError):
        return False


def _ranks(paths: list[Path]) -> dict[int, Path]:
    """Return files by rank: the last number in each file name if these are unique, otherwise the index of the file."""
    numbers = [int(found[-1]) for path in paths if (found := re.findall(r"\d+", path.stem))]
    if paths and len(set(numbers)) == len(paths) and max(numbers) <= MAX_RANK:
        return dict(sorted(zip(numbers, paths, strict=True)))
    return dict(enumerate(paths))
