"""Where the recorded texts of rollouts pass a test; they are read only where they may pass, and each prompt once."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.errors import UserError
from cavesson.index.columns import Array
from cavesson.index.said import ROWS, Test, portions
from cavesson.index.snapshot import Snapshot
from cavesson.index.texts import recorded
from cavesson.record import Run

RECORDED = ("prompt", "response", "ref_response", "ground_truth", "reasons", "extra")
"""What a filter calls the texts of a rollout; ``reasons`` are those that rewards gave, one to a line."""


class RecordedTexts:
    """The texts of [N] rollouts, whose rows may be there several times; without the run, none can be read."""

    def __init__(self, snapshot: Snapshot, run: Run | None, rows: Array) -> None:
        self.snapshot = snapshot
        self.run = run
        self.rows = rows

    def where(self, name: str, texts: Sequence[str], test: Test, narrow: bool, only: Array | None) -> Array:
        """Return [N] in which rollouts a text passes a test; a text that is missing does not.

        With ``narrow``, only a text that contains one of ``texts`` can pass. ``only`` [N] are the rollouts that are of
        interest; all of them if None.
        """
        if name == "prompt":
            return self._of_prompts(test, only)
        found = np.zeros(self.snapshot.rows, np.bool_)
        # The index of words is that of responses.
        for some in portions(self.snapshot, self.rows, texts, narrow and name == "response", only):
            found[some] = self._passed(some, name, test)
        return found[self.rows]

    def _of_prompts(self, test: Test, only: Array | None) -> Array:
        rows = self.rows if only is None else self.rows[only]
        rows = rows if self.snapshot.alive is None else rows[self.snapshot.alive[rows]]
        numbers = self.snapshot.raw("prompt")
        rows = rows[numbers[rows] >= 0]
        one = np.full(self.snapshot.state.prompts, -1, np.int64)
        one[numbers[rows]] = rows  # of each prompt any row
        passed = np.zeros(len(one) + 1, np.bool_)  # the last one is for rows without a prompt
        known = np.sort(one[one >= 0])
        for start in range(0, len(known), ROWS):
            some = known[start : start + ROWS]
            passed[numbers[some]] = self._passed(some, "prompt", test)
        return passed[np.maximum(numbers[self.rows], -1)]

    def _passed(self, rows: Array, name: str, test: Test) -> Array:
        if self.run is None:
            raise UserError(f"a filter on {name} needs the record of the run")
        column = "reward_reasons" if name == "reasons" else name
        texts = recorded(self.run, self.snapshot, rows, [column])[column]
        passed = test(_lines(texts) if name == "reasons" else texts)
        return np.asarray(pc.fill_null(passed, False).to_numpy())


def _lines(reasons: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the reasons of each row as one text, null for rows without any."""
    maps = reasons.combine_chunks()
    texts = [None if not one else "\n".join(text or "" for _, text in one) for one in maps.to_pylist()]
    return pa.chunked_array([pa.array(texts, pa.string())])
