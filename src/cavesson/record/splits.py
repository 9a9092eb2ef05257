"""The two kinds of rollouts, which are never counted together: those that were trained on, and held-out ones."""

from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

Split = Literal["train", "eval"]
"""Rollouts whose ``split`` is ``eval`` are held out; all others, also those without a split, were trained on."""
HELD_OUT: Split = "eval"
OTHER: dict[Split, Split] = {"train": "eval", "eval": "train"}
"""What is left out where a split is shown."""


def is_held_out(splits: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which values of the column ``split`` are those of held-out rollouts."""
    return pc.fill_null(pc.equal(splits, HELD_OUT), False)


def of_split(rows: pa.Table, split: Split) -> pa.Table:
    """Return the rows of a split, from a table with the column ``split``."""
    held_out = is_held_out(rows["split"])
    return rows.filter(held_out if split == HELD_OUT else pc.invert(held_out))


def rollout_counts(rows: pa.Table) -> dict[str, Any]:
    """Return the number of rollouts of each kind for a summary of a run; None for none."""
    held_out = of_split(rows, HELD_OUT).num_rows
    return {"rollouts": rows.num_rows - held_out or None, "held-out rollouts": held_out or None}
