"""Find what is new in a record since a reader last looked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cavesson.record.segments import LiveSegments, Segment, growing, listing
from cavesson.record.storage import Storage


class Changes(NamedTuple):
    """The current record, and the first step at which it differs from what the reader knew."""

    cursor: str
    """to be given the next time"""
    first_step: int | None
    """steps from here on have to be read again; None = there is nothing new"""
    segments: list[Segment]


def changes(files: Storage, now: LiveSegments, cursor: str | None) -> Changes:
    """Compare the live segments with the state in a cursor of an earlier call; None = the reader knows nothing.

    Merging segments does not count as a change.

    Raises:
        FileNotFoundError: A compaction has just removed what ``now`` names.
    """
    attempts = [[one.number, one.start_step] for one in now.attempts]
    sizes = {segment.stem: files.size(segment.name("rows")) for segment in growing(now.rows)}
    segments = {segment.stem: sizes.get(segment.stem) for segment in now.rows}
    before: dict[str, Any] = json.loads(cursor) if cursor else {"attempts": attempts, "segments": {}}
    new = [start for attempt, start in attempts if [attempt, start] not in before["attempts"]]
    new += _new_steps(files, now.rows, before["segments"])
    cursor = json.dumps({"attempts": attempts, "segments": segments})
    return Changes(cursor, min(new, default=None), now.rows)


def attempts_in(cursor: str | None) -> list[list[int]]:
    """Return number and first step of the attempts that a cursor knows."""
    return list(json.loads(cursor)["attempts"]) if cursor else []


def _new_steps(files: Storage, segments: Iterable[Segment], sizes: Mapping[str, int | None]) -> list[int]:
    """Return the first step of each segment that the reader does not know, or that has grown since.

    ``sizes`` has the size of each rows file that could still grow by its stem, and None for the others.
    """
    found = listing(files)
    sources = {segment.stem: m.replaces["rows"] for m in found.manifests for segment in m.outputs["rows"]}
    stems: list[str] = []
    for segment in segments:
        if segment.stem not in sizes:
            # Of the merged sources, only those matter that were not superseded.
            merged = [stem for stem in sources.get(segment.stem, []) if _counted(stem, segment)]
            stems += merged or [segment.stem]
        elif sizes[segment.stem] is not None:
            stems.append(segment.stem)
    return [_first_step(stem) for stem in stems if stem not in sizes or _grown(files, stem, sizes[stem])]


def _grown(files: Storage, stem: str, size: int | None) -> bool:
    try:
        return size is not None and files.size(f"record/rows-{stem}.parquet") != size
    except FileNotFoundError:
        return True  # merged and removed: it can no longer be determined


def _counted(stem: str, segment: Segment) -> bool:
    attempt = stem.split("-")[3 if stem.startswith("c-") else 1]
    return int(attempt) == segment.attempt and _first_step(stem) < segment.stop


def _first_step(stem: str) -> int:
    return int(stem.removeprefix("c-").split("-")[0])
