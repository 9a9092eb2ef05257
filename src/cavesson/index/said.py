"""Where texts of turns pass a test: those of calls, and what is said; they are read only where they may pass."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.index.calls import Calls
from cavesson.index.columns import Array
from cavesson.index.search import candidates
from cavesson.index.snapshot import Snapshot
from cavesson.index.turns import read_turns
from cavesson.record import Run
from cavesson.sorted_arrays import are_first

SAID = {"arguments": "arguments", "result": "text", "error": "error"}
"""What a filter calls the texts of a call, and the column of the turns that has each."""
SPOKEN = {"said": ("assistant", "user"), "policy": ("assistant",), "user": ("user",)}
"""What a filter calls the texts of other turns, and the roles that say them."""
ROWS = 4_096
"""Rollouts whose turns are read together."""
Test = Callable[[pa.ChunkedArray], pa.ChunkedArray]
"""Returns which of some texts pass."""


class CallTexts:
    """The texts of some calls, all those of their rows in the snapshot; without the run, none can be read."""

    def __init__(self, snapshot: Snapshot, run: Run | None, calls: Calls) -> None:
        self.snapshot = snapshot
        self.run = run
        self.calls = calls

    def where(self, name: str, texts: Sequence[str], test: Test, narrow: bool, only: Array | None) -> Array:
        """Return [C] for which calls a text passes a test; a text that is missing does not.

        With ``narrow``, only a text that contains one of ``texts`` can pass, so that only rollouts are read that may
        contain one, as the index says. ``only`` [C] are the calls that are of interest; all of them if None.
        """
        found = np.zeros(len(self.calls.row), np.bool_)
        for some in portions(self.snapshot, self.calls.row, texts, narrow, only):
            place, passed = _read(self.snapshot, self.run, some, name, SAID[name], ["tool"], test)
            first, stop = self.calls.of(some)
            call = first[place] + np.arange(len(place)) - np.searchsorted(place, place)
            # The run may have been started again since: what it has now need not be what is indexed.
            found[call[passed & (call < stop[place])]] = True
        return found


class SpokenTexts:
    """What is said in the turns of [N] rollouts, whose rows ascend and may be there several times.

    Without the run, no texts can be read.
    """

    def __init__(self, snapshot: Snapshot, run: Run | None, rows: Array) -> None:
        self.snapshot = snapshot
        self.run = run
        self.rows = rows

    def where(self, name: str, texts: Sequence[str], test: Test, narrow: bool, only: Array | None) -> Array:
        """Return [N] in which rollouts the text of a turn passes a test; the arguments are those of ``CallTexts``."""
        found = np.zeros(self.snapshot.rows, np.bool_)
        for some in portions(self.snapshot, self.rows, texts, narrow, only):
            place, passed = _read(self.snapshot, self.run, some, name, "text", SPOKEN[name], test)
            found[some[place[passed]]] = True
        return found[self.rows]


def portions(
    snapshot: Snapshot, rows: Array, texts: Sequence[str], narrow: bool, only: Array | None
) -> Iterator[Array]:
    """Yield the rows whose turns are to be read, some at a time, each once."""
    rows = rows if only is None else rows[only]
    rows = rows[are_first(rows)]
    if narrow and all(text.strip() for text in texts):
        may = candidates(snapshot, [text.strip() for text in texts])
        may[snapshot.state.text_rows :] = True
        rows = rows[may[rows]]
    for start in range(0, len(rows), ROWS):
        yield rows[start : start + ROWS]


def _read(
    snapshot: Snapshot, run: Run | None, rows: Array, name: str, column: str, roles: Sequence[str], test: Test
) -> tuple[Array, Array]:
    """Return the places of the rows of all turns of some roles, and whether the text of each turn passes the test."""
    if run is None:
        raise UserError(f"a filter on {name} needs the record of the run")
    turns = read_turns(run, snapshot, rows, ["role", column])
    turns = turns.filter(pc.is_in(turns["role"], pa.array(roles)))
    return turns["place"].to_numpy(), pc.fill_null(test(turns[column]), False).to_numpy()
