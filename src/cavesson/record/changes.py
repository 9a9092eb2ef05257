"""What is new in a record since a reader last looked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cavesson.record.segments import Segment, Snapshot, growing, listing
from cavesson.record.storage import Storage


class Changes(NamedTuple):
    """The record now, and where it begins to differ from what the reader knew."""

    cursor: str
    """to be given the next time"""
    first_step: int | None
    """steps from here on have to be read again; None = there is nothing new"""
    segments: list[Segment]


def changes(files: Storage, now: Snapshot, cursor: str | None) -> Changes:
    """Compares the record with what a cursor knew; merging segments is no change.

    Args:
        files: The run.
        now: What is there.
        cursor: From an earlier call; None = the reader knows nothing.

    Raises:
        FileNotFoundError: A compaction has just removed what ``now`` names.
    """
    attempts = [list(attempt) for attempt in now.attempts]
    sizes = {segment.stem: files.size(segment.name("rows")) for segment in growing(now.rows)}
    segments = {segment.stem: sizes.get(segment.stem) for segment in now.rows}
    known: dict[str, Any] = json.loads(cursor) if cursor else {"attempts": attempts, "segments": {}}
    new = [start for attempt, start in attempts if [attempt, start] not in known["attempts"]]
    new += _new_steps(files, now.rows, known["segments"])
    cursor = json.dumps({"attempts": attempts, "segments": segments})
    return Changes(cursor, min(new, default=None), now.rows)


def _new_steps(files: Storage, segments: Iterable[Segment], known: Mapping[str, int | None]) -> list[int]:
    """Returns the first step of everything that the reader does not know, or that has grown since.

    Args:
        files: The run.
        segments: What is there.
        known: Stems, with the size of the file where it was the newest.
    """
    found = listing(files)
    sources = {segment.stem: m.replaces["rows"] for m in found.manifests for segment in m.outputs["rows"]}
    stems: list[str] = []
    for segment in segments:
        if segment.stem not in known:
            # Of what was merged, only that matters which counted before.
            merged = [stem for stem in sources.get(segment.stem, []) if _counted(stem, segment)]
            stems += merged or [segment.stem]
        elif known[segment.stem] is not None:
            stems.append(segment.stem)
    return [_first_step(stem) for stem in stems if stem not in known or _grown(files, stem, known[stem])]


def _grown(files: Storage, stem: str, size: int | None) -> bool:
    try:
        return size is not None and files.size(f"record/rows-{stem}.parquet") != size
    except FileNotFoundError:
        return True  # merged and removed: nobody can tell any more


def _counted(stem: str, segment: Segment) -> bool:
    attempt = stem.split("-")[3 if stem.startswith("c-") else 1]
    return int(attempt) == segment.attempt and _first_step(stem) < segment.stop


def _first_step(stem: str) -> int:
    return int(stem.removeprefix("c-").split("-")[0])
