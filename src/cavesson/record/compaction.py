"""Many small segments become few large ones, while others read and write.

What is merged is written beside its sources; a manifest in ``compactions/`` then takes their place, and its appearing
is the moment of the change. The sources are deleted by the next compaction, so that who has just listed them can still
read them. A kill at any moment leaves the sources or the manifest: nothing is lost and nothing is there twice.
Every process merges only what it wrote itself, so there are no locks.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa

from cavesson.record.merging import in_order, merge_rollouts, merge_steps, write_large
from cavesson.record.segments import MANIFESTS, Kind, Listing, Segment, file_name, growing, listing, write_manifest
from cavesson.record.storage import Place, Storage, storage

WAITING = 256
"""Closed segments that a recorder lets gather before it merges them."""
FILE_LINES = 100_000
"""Rollouts, or steps, after which the next file begins."""
ABANDONED = 3600
"""Seconds after which nobody is still writing a file that no manifest names."""


def compact(
    place: Place,
    rank: int | None = None,
    before: tuple[int, int] | None = None,
    *,
    ended: bool = True,
    go_on: Callable[[], None] = lambda: None,
) -> int:
    """Merges small segments into large ones and returns how many were merged.

    Args:
        place: Run folder.
        rank: Only what this process wrote, by whom alone it is called; None = all of the run.
        before: (attempt, step) of the first segment that may still grow; None = all are closed.
        ended: Whether nobody writes the run any more: then all of it is merged, and what was merged is deleted at once.
            Otherwise each process's newest step stays as it is, and the next compaction deletes.
        go_on: Called after every step; what it raises ends the work, and the run is as it was.
    """
    files = storage(place)
    _sweep(files, rank)
    found = listing(files)
    try:
        count = _compact(files, found, _Choice(rank, before, ended), go_on)
    except FileNotFoundError:
        if _committed(listing(files)) == _committed(found):
            raise
        # Somebody else has just merged the same.
        return compact(files, rank, before, ended=ended, go_on=go_on)
    if rank is None and ended:
        _sweep(files, rank)
    return count


class _Choice(NamedTuple):
    """What is merged."""

    rank: int | None
    before: tuple[int, int] | None
    ended: bool

    def closed(self, segments: list[Segment]) -> list[Segment]:
        """Returns the small segments that nothing is added to."""
        open_ones = set() if self.ended else growing(segments)
        closed = [segment for segment in segments if not segment.compacted and segment not in open_ones]
        return [s for s in closed if self.before is None or (s.attempt, s.first) < self.before]


def _compact(files: Storage, found: Listing, choice: _Choice, go_on: Callable[[], None]) -> int:
    plan = {kind: _groups(files, kind, segments, choice) for kind, segments in _by_kind(found)}
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
            raise FileNotFoundError("what was merged has been merged by somebody else")
        write_manifest(files, f"{label}.json", replaces, outputs)
    return count


def _label(writer: str) -> str:
    """Returns a name that nothing else has, with the time in it."""
    return f"{writer}-{int(time.time()):08x}{uuid4().hex[:8]}"


def _committed(found: Listing) -> set[tuple[Kind, str]]:
    return {(kind, segment.stem) for kind, segments in _by_kind(found) for segment in segments}


def write_rollouts(place: Place, attempt: int, rows: pa.Table, tokens: pa.Table) -> None:
    """Writes rollouts of any steps as one large segment, at once: for who has many of them.

    Args:
        place: Run folder.
        attempt: Number that ``begin_attempt`` returned.
        rows: Columns of ``ROW_COLUMNS``; with ``step``, ``sample`` must be new to the record.
        tokens: Their tokens, columns of ``TOKEN_COLUMNS``.
    """
    commit(place, [write_uncommitted(place, attempt, rows, tokens)])


def write_uncommitted(place: Place, attempt: int, rows: pa.Table, tokens: pa.Table) -> Segment:
    """As ``write_rollouts``, but nobody sees the segment before ``commit`` has been called with it."""
    files = storage(place)
    steps = rows["step"].to_numpy()
    first, last = int(steps.min()), int(steps.max())
    stem = f"c-{first:08d}-{last:08d}-{attempt:04d}-{_label('all')}"
    write_large(files, stem, *in_order(rows, tokens))
    return Segment(first, last, last + 1, attempt, None, stem, rows.num_rows)


def commit(place: Place, segments: Sequence[Segment]) -> None:
    """Makes segments that ``write_uncommitted`` returned part of the record, all at once."""
    if not segments:
        return
    nothing: dict[Kind, list[str]] = {"rows": [], "steps": []}
    write_manifest(storage(place), f"{_label('all')}.json", nothing, {"rows": list(segments), "steps": []})


def _by_kind(found: Listing) -> list[tuple[Kind, list[Segment]]]:
    return [("rows", found.rows), ("steps", found.steps)]


def _groups(files: Storage, kind: Kind, segments: list[Segment], choice: _Choice) -> list[list[Segment]]:
    """Returns what is to become one file each; attempts stay apart."""
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
    """Returns compacted segments to write again, with their lines.

    A recorder takes the newest ones that are at most twice as large as what comes to them: so a line is written again
    only as often as its file doubles, and the number of files grows with the logarithm of the lines.
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
    """Returns the segments in the order of their steps, in groups of about ``FILE_LINES``; a step stays together."""
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
    """Writes one large file of the group's."""
    first, last = min(segment.first for segment in group), max(segment.last for segment in group)
    attempt = group[0].attempt
    stem = f"c-{first:08d}-{last:08d}-{attempt:04d}-{label}"
    go_on()
    lines = merge_rollouts(files, group, stem, go_on) if kind == "rows" else merge_steps(files, group, stem)
    return Segment(first, last, last + 1, attempt, rank, stem, lines)


def _sweep(files: Storage, rank: int | None) -> None:
    """Deletes what earlier compactions of this writer replaced or, killed, left behind."""
    found = listing(files)
    for name in found.lost:
        files.delete(f"{MANIFESTS}/{name}")
    mine = re.compile(r"(?:all|\d+)-\w+\.json" if rank is None else rf"{rank:04d}-\w+\.json")
    replaced = {file for manifest in found.manifests for file in manifest.replaced()}
    _delete(files, {file for m in found.manifests if mine.fullmatch(m.name) for file in m.replaced()}, found.names)
    named = {output for manifest in found.manifests for output in manifest.written()}
    for manifest in found.manifests:
        # Only when nothing of it counts any more, and no other manifest has what it keeps from counting again.
        written = manifest.written()
        if mine.fullmatch(manifest.name) and written and written <= replaced and named.isdisjoint(manifest.replaced()):
            files.delete(f"{MANIFESTS}/{manifest.name}")
    _delete_orphans(files, rank)


def _delete_orphans(files: Storage, rank: int | None) -> None:
    """Deletes large files of this writer that no manifest names: it was killed before it was done."""
    writer = "all" if rank is None else f"{rank:04d}"
    own = re.compile(
        rf"\.?(?:rows|tokens|rollups|steps)-(c-\d+-\d+-\d+-{writer}-([0-9a-f]{{8}})\w+)\.parquet(?:\.\w+)?"
    )
    found = listing(files)
    known = {segment.stem for m in found.manifests for segments in m.outputs.values() for segment in segments}
    for name in found.names:
        match = own.fullmatch(name)
        # A process has its number for itself, but a whole run may be merged by two who do not know of each other.
        if match and match[1] not in known and (rank is not None or time.time() - int(match[2], 16) > ABANDONED):
            files.delete(f"record/{name}")


def _delete(files: Storage, segments: set[tuple[Kind, str]], names: list[str] | None = None) -> None:
    """Deletes all files of segments, those that commit first: without its rows a segment is not there."""
    for kind, stem in segments:
        kinds: tuple[Kind, ...] = ("rows", "tokens", "rollups") if kind == "rows" else ("steps",)
        for name in (file_name(each, stem) for each in kinds):
            if names is None or name.removeprefix("record/") in names:
                files.delete(name)
