"""Where the texts of calls pass a test: their arguments, results and errors, which are read only where they may."""

from collections.abc import Callable, Sequence

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
from cavesson.record.keys import are_first

SAID = {"arguments": "arguments", "result": "text", "error": "error"}
"""What a filter calls the texts of a call, and the column of the turns that has each."""
ROWS = 4_096
"""Rollouts whose turns are read together."""


class CallTexts:
    """The texts of some calls.

    Args:
        snapshot: The rows that the calls are numbered by.
        run: The run, if texts are to be read.
        calls: The calls; all those of their rows.
    """

    def __init__(self, snapshot: Snapshot, run: Run | None, calls: Calls) -> None:
        self.snapshot = snapshot
        self.run = run
        self.calls = calls

    def where(
        self, name: str, texts: Sequence[str], test: Callable[[pa.ChunkedArray], pa.ChunkedArray], narrow: bool
    ) -> Array:
        """Return [C] for which calls a text passes a test; a text that is missing does not.

        Args:
            name: One of ``SAID``.
            texts: Only a text that contains one of these can pass, if ``narrow``.
            test: Returns which of some texts pass.
            narrow: Whether to read only rollouts that may contain one of the texts, as the index says.
        """
        found = np.zeros(len(self.calls.row), np.bool_)
        rows = self.calls.row[are_first(self.calls.row)]
        if narrow and all(text.strip() for text in texts):
            may = candidates(self.snapshot, [text.strip() for text in texts])
            may[self.snapshot.state.text_rows :] = True
            rows = rows[may[rows]]
        for start in range(0, len(rows), ROWS):
            some = rows[start : start + ROWS]
            place, passed = self._read(some, name, test)
            first, stop = self.calls.of(some)
            call = first[place] + np.arange(len(place)) - np.searchsorted(place, place)
            # The run may have been started again since: what it has now need not be what is indexed.
            found[call[passed & (call < stop[place])]] = True
        return found

    def _read(self, rows: Array, name: str, test: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> tuple[Array, Array]:
        """Return the places of the rows of all calls, and whether the text of each call passes the test."""
        if self.run is None:
            raise UserError(f"a filter on {name} needs the record of the run")
        turns = read_turns(self.run, self.snapshot, rows, ["role", SAID[name]])
        turns = turns.filter(pc.equal(turns["role"], "tool"))
        passed = pc.fill_null(test(turns[SAID[name]]), False)
        return turns["place"].to_numpy(), passed.to_numpy()
