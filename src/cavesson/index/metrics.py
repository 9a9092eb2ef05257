"""The logged metrics of all steps in one file, written again whenever the record has more of them."""

import hashlib
from pathlib import Path

import pyarrow as pa

from cavesson.index.folder import State, metrics_name
from cavesson.record import Run
from cavesson.record.files import replacing
from cavesson.record.segments import snapshot

GROWING = 8
"""The newest files, whose size is looked at: more metrics may be added to their steps."""


def add_metrics(folder: Path, state: State, run: Run) -> State:
    """Returns the state with the metrics as the record has them now; the same state if it had them."""
    cursor = _cursor(run)
    if cursor == state.metrics_cursor:
        return state
    number = state.metrics + 1
    table = run.steps()
    with replacing(folder / metrics_name(number)) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    # Whoever still reads the one before has it open; the one before that goes.
    (folder / metrics_name(number - 2)).unlink(missing_ok=True)
    return state.with_(metrics=number, metrics_cursor=cursor)


def _cursor(run: Run) -> str:
    """Returns what changes when the record has other metrics."""
    segments = snapshot(run.storage).steps
    names = [(segment.stem, segment.stop) for segment in segments]
    sizes = []
    for segment in segments[-GROWING:]:
        try:
            sizes.append(run.storage.size(segment.name("steps")))
        except FileNotFoundError:
            sizes.append(-1)  # merged with others meanwhile
    return hashlib.sha256(repr((names, sizes)).encode()).hexdigest()[:16]
