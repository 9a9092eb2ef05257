"""The files of a record: list them, determine which are in force, and write them."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cavesson.record.former_names import current
from cavesson.record.precision import Array
from cavesson.record.rollups import rollups_of
from cavesson.record.run_folder import Attempt, attempts
from cavesson.record.schema import PLACE_COLUMNS, Column
from cavesson.record.storage import Storage

Kind = Literal["rows", "tokens", "turns", "steps", "rollups"]
KINDS: tuple[Kind, Kind] = ("rows", "steps")
"""What commits: a segment is there when its file of rows, or of metrics, is."""
TOKEN_KEYS = ["step", "sample", "position"]
TURN_KEYS = ["step", "sample", "turn"]
MANIFESTS = "compactions"
FOLDERS = ("record", MANIFESTS, "attempts")
_NAME = re.compile(r"(rows|tokens|steps)-(\d{8,})-(\d{4,})-(\d{4,})(?:-(\d{8,}))?\.parquet")


@dataclass(frozen=True)
class Segment:
    """Files with a common stem: the rows, tokens, turns and roll-ups of rollouts, or the steps of metrics."""

    first: int
    last: int
    """the steps in the files"""
    stop: int
    """lines of this step and later ones are superseded by a later attempt"""
    attempt: int
    rank: int | None
    """None = several processes"""
    stem: str
    lines: int | None = None
    """rollouts in a compacted segment, which never changes; None = as a recorder wrote it, and may still add to it"""

    @property
    def compacted(self) -> bool:
        return self.lines is not None

    def name(self, kind: Kind) -> str:
        return file_name(kind, self.stem)


class Manifest(NamedTuple):
    """A completed compaction: the segments it wrote and the ones they replace."""

    name: str
    replaces: dict[Kind, list[str]]
    """rows and steps: their stems"""
    outputs: dict[Kind, list[Segment]]

    def replaced(self) -> set[tuple[Kind, str]]:
        return {(kind, stem) for kind, stems in self.replaces.items() for stem in stems}

    def written(self) -> set[tuple[Kind, str]]:
        return {(kind, segment.stem) for kind, segments in self.outputs.items() for segment in segments}


class Listing(NamedTuple):
    """All committed segments, including those of superseded attempts but not those that a compaction replaced."""

    rows: list[Segment]
    steps: list[Segment]
    names: list[str]
    """every file in the folder"""
    manifests: list[Manifest]
    """in force"""
    lost: list[str]
    """manifests that lost a race: of two compactions of the same file the first by its name counts"""


class LiveSegments(NamedTuple):
    """The segments in force, ordered by step."""

    rows: list[Segment]
    steps: list[Segment]
    attempts: list[Attempt]


def growing(segments: Iterable[Segment]) -> set[Segment]:
    """Return the last segment of each process in the last attempt; only these may still grow."""
    some = sorted(segments, key=lambda segment: segment.first)
    attempt = max((segment.attempt for segment in some), default=0)
    return set({s.rank: s for s in some if s.attempt == attempt and not s.compacted}.values())


def with_steps(segments: Iterable[Segment], steps: Collection[int] | None) -> list[Segment]:
    """Return the segments that can contain these steps; all segments if ``steps`` is None."""
    if steps is None:
        return list(segments)
    return [s for s in segments if any(s.first <= step < min(s.stop, s.last + 1) for step in steps)]


def overlapping(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Yield segments, which must be ordered by step, in groups with overlapping steps."""
    some: list[Segment] = []
    for segment in segments:
        if some and segment.first > max(one.last for one in some):
            yield some
            some = []
        some.append(segment)
    if some:
        yield some


def file_name(kind: Kind, stem: str) -> str:
    return f"record/{kind}-{stem}.parquet"


def segment_name(kind: Kind, step: int, attempt: int, rank: int, last: int | None = None) -> str:
    """Return the name, relative to the run folder, of the file with one process's part of a step, or up to ``last``."""
    return file_name(kind, _stem(step, attempt, rank, last))


def _stem(step: int, attempt: int, rank: int, last: int | None) -> str:
    stem = f"{step:08d}-{attempt:04d}-{rank:04d}"
    return stem if last in (None, step) else f"{stem}-{last:08d}"


def live_segments(files: Storage) -> LiveSegments:
    """Return the committed segments that no later attempt superseded."""
    state = files.state(FOLDERS)
    return _live_segments(files) if state is None else _remembered(files, state)


@lru_cache(maxsize=64)
def _remembered(files: Storage, state: tuple[int, ...]) -> LiveSegments:
    return _live_segments(files)


def _live_segments(files: Storage) -> LiveSegments:
    # The attempts are read after the files: a new attempt in between can only hide files, never show both attempts.
    found = listing(files)
    starts = attempts(files)
    return LiveSegments(
        _live(found.rows, starts, complete_until(found.rows, starts)), _live(found.steps, starts, {}), starts
    )


def _live(segments: Iterable[Segment], starts: Sequence[Attempt], ends: Mapping[int, int]) -> list[Segment]:
    """Return the segments without what later attempts superseded, and up to the step at which their attempt ends."""
    live = []
    for segment in segments:
        stops = [ends.get(segment.attempt, segment.stop)]
        stops += [one.start_step for one in starts if one.number > segment.attempt]
        stop = min(segment.stop, *stops)
        if segment.first < stop:
            live.append(replace(segment, stop=stop))
    return sorted(live, key=lambda segment: (segment.first, segment.last, segment.stem))


def complete_until(segments: Sequence[Segment], attempts: Iterable[Attempt]) -> dict[int, int]:
    """Return the first step that not all processes have recorded, by the numbers of attempts of several processes."""
    return {one.number: _complete_until(segments, one) for one in attempts if one.processes > 1}


def _complete_until(segments: Sequence[Segment], attempt: Attempt) -> int:
    last = dict.fromkeys(range(attempt.processes), attempt.start_step - 1)  # each of them records steps in order
    for segment in segments:
        if segment.attempt == attempt.number:
            for rank in last if segment.rank is None else [segment.rank]:
                last[rank] = max(last[rank], segment.last)
    return min(last.values()) + 1


def listing(files: Storage) -> Listing:
    """Return all committed segments, file names and manifests of a run.

    The files are listed before the manifests: a file removed in between is named by a manifest that already existed.
    The outputs of a manifest exist, even if they appeared only after the files were listed.
    """
    names = files.names("record")
    replaced: set[tuple[Kind, str]] = set()
    kept, lost = [], []
    for manifest in _manifests(files):
        if replaced.isdisjoint(manifest.replaced()):
            replaced |= manifest.replaced()
            kept.append(manifest)
        else:
            lost.append(manifest.name)
    segments = _small(names)
    for kind in KINDS:
        segments[kind] += [segment for manifest in kept for segment in manifest.outputs[kind]]
        segments[kind] = [segment for segment in segments[kind] if (kind, segment.stem) not in replaced]
    return Listing(segments["rows"], segments["steps"], names, kept, lost)


def _manifests(files: Storage) -> list[Manifest]:
    while True:
        try:
            return [_manifest(files, name) for name in sorted(files.names(MANIFESTS)) if name[0] != "."]
        except FileNotFoundError:
            continue  # a compaction has just removed a manifest because another one replaces it


def _small(names: Iterable[str]) -> dict[Kind, list[Segment]]:
    """Return the segments as recorders wrote them; rollouts count if both their rows and tokens files exist."""
    found: dict[str, dict[str, Segment]] = {"rows": {}, "tokens": {}, "steps": {}}
    for name in names:
        if match := _NAME.fullmatch(name):
            kind, step, attempt, rank = match[1], int(match[2]), int(match[3]), int(match[4])
            last = int(match[5] or step)
            stem = _stem(step, attempt, rank, last)
            found[kind][stem] = Segment(step, last, last + 1, attempt, rank, stem)
    rows = [segment for stem, segment in found["rows"].items() if stem in found["tokens"]]
    return {"rows": rows, "steps": list(found["steps"].values())}


@lru_cache(maxsize=4096)
def _manifest(files: Storage, name: str) -> Manifest:
    """Read a manifest; it can be cached because manifests never change."""
    content = files.read(f"{MANIFESTS}/{name}")
    try:
        found = json.loads(content)
        outputs = {kind: [_segment(fields) for fields in found[kind]] for kind in KINDS}
        return Manifest(name, found["replaces"], outputs)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{files.path(f'{MANIFESTS}/{name}')} does not say what was merged") from error


def _segment(fields: Mapping[str, Any]) -> Segment:
    """Return a segment as a manifest describes it; raise ValueError if a value, which gets into names and SQL, is
    wrong.
    """
    segment = Segment(**fields)
    numbers = (segment.first, segment.last, segment.stop, segment.attempt, segment.rank or 0, segment.lines or 0)
    if not all(type(number) is int for number in numbers) or not re.fullmatch(r"[\w-]+", segment.stem):
        raise ValueError(f"{dict(fields)} is not a segment")
    return segment


def write_manifest(
    files: Storage, name: str, replaces: dict[Kind, list[str]], outputs: dict[Kind, list[Segment]]
) -> None:
    """Commit ``outputs`` in place of the segments with the stems in ``replaces``."""
    content: dict[str, Any] = {"replaces": replaces}
    content |= {kind: [vars(segment) for segment in outputs[kind]] for kind in KINDS}
    with files.writing(f"{MANIFESTS}/{name}") as file:
        file.write(json.dumps(content).encode())


def is_compacted(files: Storage, name: str) -> bool:
    """Whether a compaction has replaced a file of rows."""
    return any(stem_of(name) in manifest.replaces["rows"] for manifest in _manifests(files))


def stem_of(name: str) -> str:
    """Return the stem of a file of rows."""
    return name.removeprefix("record/rows-").removesuffix(".parquet")


def without_places(rows: pa.Table) -> pa.Table:
    return rows.drop_columns([column.name for column in PLACE_COLUMNS if column.name in rows.column_names])


def with_places(rows: pa.Table, columns: Sequence[Column], start: int, count: Array) -> pa.Table:
    """Return the rows with the location of each row's tokens, or turns, in the file with the same stem.

    The [N] rows have ``count`` lines each, which follow each other in the order of the rows, the first of them in line
    ``start``. ``columns`` are ``TOKEN_PLACES`` or ``TURN_PLACES``.
    """
    for column, values in zip(columns, (start + np.cumsum(count) - count, count), strict=True):
        rows = rows.append_column(column.name, pa.array(values, column.type))
    return rows


def write_parquet(files: Storage, name: str, table: pa.Table) -> None:
    with files.writing(name) as file:
        pq.write_table(table, file, **layout(table.schema))


def layout(schema: pa.Schema, level: int = 3) -> dict[str, Any]:
    """Return options for writing Parquet: floats of tokens are byte-split, because dictionaries do not help noise."""
    if "position" not in schema.names:
        return {"compression": "zstd", "compression_level": level}
    encodings = {field.name: "BYTE_STREAM_SPLIT" for field in schema if pa.types.is_floating(field.type)}
    encodings["position"] = "DELTA_BINARY_PACKED"
    dictionary = [name for name in schema.names if name not in encodings]
    # Statistics only for the columns that queries filter by; those of noise are the same in every row group.
    options = {"column_encoding": encodings, "use_dictionary": dictionary, "write_statistics": TOKEN_KEYS}
    return {"compression": "zstd", "compression_level": level, **options}


def union(*tables: pa.Table) -> pa.Table:
    """Concatenate the rows of all tables; columns that a table lacks are null."""
    return pa.concat_tables(tables, promote_options="permissive")


def by_step(files: Storage, segment: Segment, kind: Kind) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows of a file step by step, reading one row group at a time."""
    file = files.parquet(segment.name(kind))
    pending: pa.Table | None = None
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        table = current(table) if kind == "tokens" else table
        pending = table if pending is None else union(pending, table)
        bounds = [0, *(np.flatnonzero(np.diff(pending["step"].to_numpy())) + 1).tolist()]
        for start, end in pairwise(bounds):
            yield pending["step"][start].as_py(), pending.slice(start, end - start)
        pending = pending.slice(bounds[-1])
    if pending is not None and pending.num_rows:
        yield pending["step"][0].as_py(), pending


def rollups_in(files: Storage, segment: Segment, columns: list[str] | None = None) -> pa.Table:
    """Return a segment's roll-ups, all columns or some; they are computed if the record has none."""
    try:
        return files.parquet(segment.name("rollups")).read(columns)
    except FileNotFoundError:
        rows, tokens = (files.parquet(segment.name(kind)).read() for kind in ("rows", "tokens"))
        found = rollups_of(rows, current(tokens))
        return found if columns is None else found.select(columns)
