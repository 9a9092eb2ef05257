"""Add to a record what is not in it: from the fallback folder of a recorder, or from the journal of a killed one."""

import re
import shutil
from pathlib import Path

import numpy as np

from cavesson.record.keys import rollout_keys
from cavesson.record.maintain.compaction import write_rollouts
from cavesson.record.precision import Array
from cavesson.record.segments import Segment, listing
from cavesson.record.storage import Folder, Location, Storage, small_table, storage
from cavesson.record.tables import Tables
from cavesson.record.write.journal import abandoned
from cavesson.record.write.lock import written_elsewhere
from cavesson.record.write.writing import (
    Metrics,
    Rollouts,
    Rows,
    metrics_by_step,
    read_segment,
    tables_of,
    write_metrics,
    write_segment,
)

_JOURNAL = re.compile(r"\.journal-(\d{4,})-(\d{4,})")


def recover(location: Location) -> None:
    """Add what killed processes had recorded but not written to segments; the journals of running ones stay."""
    files = storage(location)
    # A shared file system may not show the locks of other machines.
    if files.growing("record") is None or written_elsewhere(files):
        return
    for name in files.names("record"):
        match = _JOURNAL.fullmatch(name)
        path = files.growing(f"record/{name}")
        if match is None or path is None:
            continue
        attempt, rank = int(match[1]), int(match[2])
        with abandoned(path) as calls:
            if not calls:
                continue
            rollouts = [call for call in calls if isinstance(call, Rollouts)]
            tables = tables_of(rollouts, attempt, rank, lambda error: None)  # such a call has ended its own run
            if tables is not None:
                _add_rollouts(files, attempt, rank, tables)
            _add_metrics(files, attempt, rank, metrics_by_step(call for call in calls if isinstance(call, Metrics)))


def add_fallback(fallback: Path, location: Location) -> None:
    """Add to a record what a recorder could only write to its fallback folder, and remove the folder.

    If that is interrupted, it can be repeated: nothing is added twice. The record may have been merged meanwhile; then
    it has either all metrics of a step or none of them.
    """
    files, found = storage(location), listing(Folder(fallback))
    for segment in found.rows:
        _add_rollouts(files, segment.attempt, segment.rank or 0, read_segment(Folder(fallback), segment.stem))
    for segment in found.steps:
        _add_metrics(files, segment.attempt, segment.rank or 0, _metrics(Folder(fallback), segment))
    shutil.rmtree(fallback, ignore_errors=True)


def _add_rollouts(files: Storage, attempt: int, rank: int, tables: Tables) -> None:
    keys = rollout_keys(tables.rows)
    first, last = int(keys.min() >> 32), int(keys.max() >> 32)
    there = [s for s in listing(files).rows if s.attempt == attempt and s.first <= last and s.last >= first]
    merged = _keys(files, [segment for segment in there if segment.compacted], rank)
    known = _keys(files, [segment for segment in there if not segment.compacted], rank)
    new, in_merged = ~np.isin(keys, np.append(merged, known)), np.isin(keys >> 32, merged >> 32)
    for chosen, is_merged in ((new & in_merged, True), (new & ~in_merged, False)):
        some = tables.only(keys[chosen])
        if not len(some.rows):
            continue
        if is_merged:
            write_rollouts(files, attempt, *some)
        else:
            write_segment(files, attempt, rank, some)


def _keys(files: Storage, segments: list[Segment], rank: int) -> Array:
    """Return the keys of a process's rollouts in some segments."""
    tables = [files.parquet(segment.name("rows")).read(["step", "sample", "rank"]) for segment in segments]
    keys = [rollout_keys(table)[table["rank"].to_numpy() == rank] for table in tables]
    return np.concatenate([np.zeros(0, np.int64), *keys])


def _add_metrics(files: Storage, attempt: int, rank: int, rows: Rows) -> None:
    for segment in listing(files).steps:
        if segment.attempt != attempt or not any(segment.first <= step <= segment.last for step in rows):
            continue
        there = _metrics(files, segment)
        added = {step: rows.pop(step) for step in there.keys() & rows.keys()}
        if added and not segment.compacted:
            write_metrics(files, attempt, rank, there | {step: there[step] | added[step] for step in added})
    if rows:
        write_metrics(files, attempt, rank, rows)


def _metrics(files: Storage, segment: Segment) -> Rows:
    lines = small_table(files, segment.name("steps")).drop_columns("attempt").to_pylist()
    return {line.pop("step"): {name: value for name, value in line.items() if value is not None} for line in lines}
