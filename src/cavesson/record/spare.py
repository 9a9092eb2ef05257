"""Add to a record what a recorder could only write to its spare folder."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from cavesson.record.compaction import write_rollouts
from cavesson.record.recorder import write_metrics
from cavesson.record.segments import Segment, listing, without_samples, write_segment
from cavesson.record.storage import Folder, Location, Storage, small_table, storage


def add_spare(spare: Path, place: Location) -> None:
    """Add to a record what a recorder could only write to its spare folder, and remove the folder.

    If that is interrupted, it can be repeated: nothing is added twice. The record may have been merged meanwhile; then
    it has either all metrics of a step or none of them.
    """
    files, found = storage(place), listing(Folder(spare))
    present = listing(files)
    for segment in found.rows:
        rows, tokens = (small_table(Folder(spare), segment.name(kind)) for kind in ("rows", "tokens"))
        merged = _merged(present.rows, segment)
        known = [_samples(files, one, segment) for one in merged]
        if not any(map(len, known)):
            write_segment(files, segment.first, segment.attempt, segment.rank or 0, rows, tokens)
        elif len(rows := without_samples(rows, pa.concat_arrays(known))):
            write_rollouts(files, segment.attempt, rows, tokens)
    for segment in found.steps:
        if not any(_has_step(files, one, segment) for one in _merged(present.steps, segment)):
            (metrics,) = small_table(Folder(spare), segment.name("steps")).drop_columns(["step", "attempt"]).to_pylist()
            write_metrics(files, segment.first, segment.attempt, segment.rank or 0, metrics)
    shutil.rmtree(spare, ignore_errors=True)


def _merged(segments: Iterable[Segment], one: Segment) -> list[Segment]:
    """Return the merged segments that may contain the step of a segment."""
    return [s for s in segments if s.compacted and s.attempt == one.attempt and s.first <= one.first <= s.last]


def _samples(files: Storage, merged: Segment, one: Segment) -> pa.Array:
    """Return the samples of a segment's step and rank that a merged segment contains."""
    rows = files.parquet(merged.name("rows")).read(["step", "rank", "sample"])
    mine = pc.and_(pc.equal(rows["step"], one.first), pc.equal(rows["rank"], one.rank))
    return rows.filter(mine)["sample"].combine_chunks()


def _has_step(files: Storage, merged: Segment, one: Segment) -> bool:
    return one.first in files.parquet(merged.name("steps")).read(["step"])["step"].to_pylist()
