"""The logged metrics of all steps in one file, which is written again whenever the record has new metrics."""

import hashlib
from pathlib import Path

from cavesson.index.folder import State, metrics_name
from cavesson.index.maps import write_table
from cavesson.record import Run
from cavesson.record.segments import live_segments

GROWING = 8
"""The newest files, whose size is looked at: more metrics may be added to their steps."""


def add_metrics(folder: Path, state: State, run: Run) -> State:
    """Return the state with the current metrics of the record, or the same state if they have not changed."""
    cursor = _cursor(run)
    if cursor == state.metrics_cursor:
        return state
    number = state.metrics + 1
    write_table(folder / metrics_name(number), run.steps().combine_chunks())
    # Readers may still be about to open the previous file, so only the one before it is removed.
    (folder / metrics_name(number - 2)).unlink(missing_ok=True)
    return state.with_(metrics=number, metrics_cursor=cursor)


def _cursor(run: Run) -> str:
    """Return a value that changes whenever the metrics of the record change."""
    segments = live_segments(run.storage).steps
    names = [(segment.stem, segment.stop) for segment in segments]
    sizes = []
    for segment in segments[-GROWING:]:
        try:
            sizes.append(run.storage.size(segment.name("steps")))
        except FileNotFoundError:
            sizes.append(-1)  # merged with other segments in the meantime
    return hashlib.sha256(repr((names, sizes)).encode()).hexdigest()[:16]
