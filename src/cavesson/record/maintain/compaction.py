"""Merge many small segments into a few large ones while other processes read and write.

The merged segments are written beside their sources. A manifest in ``compactions/`` then replaces the sources; the
change takes effect atomically when the manifest appears. The next compaction deletes the sources, so that a reader that
has just listed them can still read them. A kill at any moment leaves either the sources or the manifest in force:
nothing is lost or counted twice. Each process merges only what it wrote itself, so no locks are needed.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa

from cavesson.record.former_names import current
from cavesson.record.maintain.merging import in_order, merge_rollouts, merge_steps, write_large
from cavesson.record.run_folder import attempts
from cavesson.record.segments import (
    MANIFESTS,
    Kind,
    Listing,
    Segment,
    complete_until,
    file_name,
    growing,
    listing,
    write_manifest,
)
from cavesson.record.storage import Location, Storage, storage
from cavesson.record.tables import NO_TURNS, Tables

WAITING = 256
"""Files of rows and of metrics that a recorder lets gather before it merges them."""
FILE_LINES = 100_000
"""Rollouts, or steps, after which the next file begins."""
ABANDONED = 3600
"""Seconds after which nobody is still writing a file that no manifest names."""


def compact(
    location: Location,
    rank: int | None = None,
    before: tuple[int, int] | None = None,
    *,
    ended: bool = True,
    go_on: Callable[[], None] = lambda: None,
) -> int:
    """Merge small segments into large ones and return the number of merged segments.

    Args:
        location: Run folder.
        rank: Merge only what this process wrote; only that process may call it. None = the whole run.
        before: (attempt, step) of the first segment that may still grow; None = all are closed.
        ended: Whether no process writes the run any more. If so, everything is merged, and for the whole run
            (``rank`` is None) the sources are deleted at once. Otherwise the newest segment of each process stays as
            it is, and the next compaction deletes the sources.
        go_on: Called before every step; an exception that it raises aborts the merge and leaves the run unchanged.
    """
    files = storage(location)
    _sweep(files, rank)
    found = listing(files)
    try:
        count = _compact(files, found, _Choice(rank, before, ended), go_on)
    except FileNotFoundError:
        if _committed(listing(files)) == _committed(found):
            raise
        # Another process has just merged the same segments.
        return compact(files, rank, before, ended=ended, go_on=go_on)
    if rank is None and ended:
        _sweep(files, rank)
    return count


class _Choice(NamedTuple):
    """The selection of segments to merge."""

    rank: int | None
    before: tuple[int, int] | None
    ended: bool

    def closed(self, segments: list[Segment]) -> list[Segment]:
        """Return the small segments that can no longer grow."""
        open_ones = set() if self.ended else growing(segments)
        closed = [segment for segment in segments if not segment.compacted and segment not in open_ones]
        return [s for s in closed if self.before is None or (s.attempt, s.last) < self.before]


def _compact(files: Storage, listed: Listing, choice: _Choice, go_on: Callable[[], None]) -> int:
    complete = listed if choice.rank is not None else _complete(files, listed)
    plan = {kind: _groups(files, kind, segments, choice) for kind, segments in _by_kind(complete)}
    replaces = {kind: [segment.stem for group in plan[kind] for segment in group] for kind in plan}
    rank = choice.rank
    label = _label("all" if rank is None else f"{rank:04d}")
    outputs = {
        kind: [_merge(files, kind, group, rank, f"{label}{i:x}", go_on) for i, group in enumerate(plan[kind])]
        for kind in plan
    }
    count = sum(map(len, replaces.values()))
    if count:
        sources = {(kind, stem) for kind, stems in replaces.items() for stem in stems}
        if not sources <= _committed(listing(files)):
            raise FileNotFoundError("another process has already merged these segments")
        write_manifest(files, f"{label}.json", replaces, outputs)
    return count


def _complete(files: Storage, listed: Listing) -> Listing:
    """Leave out the rollouts of steps that some process has not recorded: merged files do not name processes."""
    ends = complete_until(listed.rows, attempts(files))
    return listed._replace(rows=[one for one in listed.rows if one.last < ends.get(one.attempt, one.stop)])


def _label(writer: str) -> str:
    """Return a unique name that contains the time."""
    return f"{writer}-{int(time.time()):08x}{uuid4().hex[:8]}"


def _committed(listed: Listing) -> set[tuple[Kind, str]]:
    return {(kind, segment.stem) for kind, segments in _by_kind(listed) for segment in segments}


def write_rollouts(
    location: Location, attempt: int, rows: pa.Table, tokens: pa.Table, turns: pa.Table = NO_TURNS
) -> None:
    """Write rollouts of any steps as one large segment, for callers that have many of them at once.

    `rows`, `tokens` and `turns` are columns of ``ROW_COLUMNS``, ``TOKEN_COLUMNS`` and ``TURN_COLUMNS``; ``step`` with
    ``sample`` must be new to the record.
    """
    commit(location, [write_uncommitted(location, attempt, Tables(rows, current(tokens), turns))])


def write_uncommitted(location: Location, attempt: int, tables: Tables) -> Segment:
    """Like ``write_rollouts``, but readers see the segment only after ``commit`` is called with it."""
    files = storage(location)
    steps = tables.rows["step"].to_numpy()
    first, last = int(steps.min()), int(steps.max())
    stem = f"c-{first:08d}-{last:08d}-{attempt:04d}-{_label('all')}"
    write_large(files, stem, in_order(tables))
    return Segment(first, last, last + 1, attempt, None, stem, tables.rows.num_rows)


def commit(location: Location, segments: Sequence[Segment]) -> None:
    """Add segments that ``write_uncommitted`` returned to the record, atomically."""
    if not segments:
        return
    nothing: dict[Kind, list[str]] = {"rows": [], "steps": []}
    write_manifest(storage(location), f"{_label('all')}.json", nothing, {"rows": list(segments), "steps": []})


def _by_kind(listed: Listing) -> list[tuple[Kind, list[Segment]]]:
    return [("rows", listed.rows), ("steps", listed.steps)]


def _groups(files: Storage, kind: Kind, segments: list[Segment], choice: _Choice) -> list[list[Segment]]:
    """Return the groups of segments to merge into one file each; attempts are kept separate."""
    mine = [segment for segment in segments if choice.rank is None or segment.rank == choice.rank]
    closed = choice.closed(mine)
    groups = []
    for attempt in sorted({segment.attempt for segment in mine}):
        own = [segment for segment in mine if segment.attempt == attempt]
        lines = {s: files.parquet(s.name(kind)).metadata.num_rows for s in closed if s.attempt == attempt}
        lines |= _worth_merging(own, sum(lines.values()), everything=choice.rank is None)
        groups += _cut(lines)
    return [group for group in groups if len(group) > 1]


def _worth_merging(own: list[Segment], lines: int, everything: bool) -> dict[Segment, int]:
    """Return the compacted segments to rewrite, with their number of rows.

    A recorder takes the newest ones that are at most twice as large as what is added to them. A row is therefore
    rewritten only as often as its file doubles, and the number of files grows with the logarithm of the rows.
    """
    found = {}
    for segment in sorted(own, key=lambda segment: segment.last, reverse=True):
        if segment.lines is None or segment.lines > FILE_LINES // 2:
            continue
        if not everything and segment.lines > 2 * lines:
            break
        lines += segment.lines
        found[segment] = segment.lines
    return found


def _cut(lines: dict[Segment, int]) -> list[list[Segment]]:
    """Return the segments ordered by step, in groups of about ``FILE_LINES`` rows; steps are never split."""
    groups: list[list[Segment]] = [[]]
    size = 0
    for segment in sorted(lines, key=lambda segment: (segment.first, segment.stem)):
        if size >= FILE_LINES and segment.first > max(other.last for other in groups[-1]):
            groups.append([])
            size = 0
        groups[-1].append(segment)
        size += lines[segment]
    return groups


def _merge(
    files: Storage, kind: Kind, group: list[Segment], rank: int | None, label: str, go_on: Callable[[], None]
) -> Segment:
    """Merge a group of segments into one large segment."""
    first, last = min(segment.first for segment in group), max(segment.last for segment in group)
    attempt = group[0].attempt
    stem = f"c-{first:08d}-{last:08d}-{attempt:04d}-{label}"
    go_on()
    lines = merge_rollouts(files, group, stem, go_on) if kind == "rows" else merge_steps(files, group, stem)
    return Segment(first, last, last + 1, attempt, rank, stem, lines)


def _sweep(files: Storage, rank: int | None) -> None:
    """Delete the files that earlier compactions of this writer replaced, or left behind when killed."""
    found = listing(files)
    for name in found.lost:
        files.delete(f"{MANIFESTS}/{name}")
    mine = re.compile(r"(?:all|\d+)-\w+\.json" if rank is None else rf"{rank:04d}-\w+\.json")
    replaced = {file for manifest in found.manifests for file in manifest.replaced()}
    _delete(files, {file for m in found.manifests if mine.fullmatch(m.name) for file in m.replaced()}, found.names)
    named = {output for manifest in found.manifests for output in manifest.written()}
    for manifest in found.manifests:
        # Only if all its outputs are replaced, and none of the sources it hides is the output of another manifest.
        written = manifest.written()
        if mine.fullmatch(manifest.name) and written and written <= replaced and named.isdisjoint(manifest.replaced()):
            files.delete(f"{MANIFESTS}/{manifest.name}")
    _delete_orphans(files, rank)


def _delete_orphans(files: Storage, rank: int | None) -> None:
    """Delete large files of this writer that no manifest names, left behind when it was killed."""
    writer = "all" if rank is None else f"{rank:04d}"
    own = re.compile(
        rf"\.?(?:rows|tokens|turns|rollups|steps)-(c-\d+-\d+-\d+-{writer}-([0-9a-f]{{8}})\w+)\.parquet(?:\.\w+)?"
    )
    found = listing(files)
    known = {segment.stem for m in found.manifests for segments in m.outputs.values() for segment in segments}
    for name in found.names:
        match = own.fullmatch(name)
        # Ranks are unique, but two processes may merge a whole run without knowing of each other.
        if match and match[1] not in known and (rank is not None or time.time() - int(match[2], 16) > ABANDONED):
            files.delete(f"record/{name}")


def _delete(files: Storage, segments: set[tuple[Kind, str]], names: list[str]) -> None:
    """Delete those files of segments that exist, the committing ones first: without its rows, a segment is gone."""
    for kind, stem in segments:
        kinds: tuple[Kind, ...] = ("rows", "tokens", "turns", "rollups") if kind == "rows" else ("steps",)
        for name in (file_name(each, stem) for each in kinds):
            if name.removeprefix("record/") in names:
                files.delete(name)
