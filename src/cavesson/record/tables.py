"""What a segment holds: rollouts, their tokens and their turns."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cavesson.record.keys import rollout_keys
from cavesson.record.precision import Array
from cavesson.record.schema import TURN_COLUMNS, arrow_schema

# Not empty_table(), whose arrays would load pandas with the package.
NO_TURNS = pa.Table.from_batches([], arrow_schema(TURN_COLUMNS))


class Tables(NamedTuple):
    """Rollouts, in any order."""

    rows: pa.Table
    tokens: pa.Table
    turns: pa.Table = NO_TURNS

    def without(self, keys: Array) -> "Tables":
        """Return the rollouts without those that ``keys``, as of ``rollout_keys``, name."""
        return Tables(*(table.filter(pa.array(~np.isin(rollout_keys(table), keys))) for table in self))

    def only(self, keys: Array) -> "Tables":
        """Return the rollouts that ``keys``, as of ``rollout_keys``, name."""
        return Tables(*(table.filter(pa.array(np.isin(rollout_keys(table), keys))) for table in self))


def turn_counts(turns: pa.Table) -> dict[str, Any]:
    """Return the number of turns, and of calls of tools, for a summary of a run; None for none.

    ``turns`` has the columns ``role`` and ``error``.
    """
    calls = turns.filter(pc.equal(turns["role"], "tool"))
    failed = len(calls) - calls["error"].null_count
    said = f"{len(calls)}, {failed} failed" if failed else len(calls) or None
    return {"turns": len(turns) or None, "calls of tools": said}


def together(parts: "list[Tables]") -> Tables:
    """Return the rollouts of all parts; columns that a part lacks are null."""
    return Tables(*(pa.concat_tables(tables, promote_options="permissive") for tables in zip(*parts, strict=True)))
