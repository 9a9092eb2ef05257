"""The kinds of rollouts, which are never counted together: sampled and trained on, given by the data, and held out."""

from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc

Split = Literal["train", "given", "eval"]
"""Rollouts whose ``split`` is ``eval`` are held out. Those whose split is ``given`` were trained on, but the data gave
their responses. The policy sampled all others, also those without a split, to train on them."""
GIVEN: Split = "given"
HELD_OUT: Split = "eval"
OTHER: dict[Split, Split] = {"train": "eval", "given": "train", "eval": "train"}
"""What is left out where a split is shown."""


def is_held_out(splits: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which values of the column ``split`` are those of held-out rollouts."""
    return pc.fill_null(pc.equal(splits, HELD_OUT), False)


def is_sampled(splits: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return which values of the column ``split`` are those of rollouts that the policy sampled to train on them."""
    return pc.invert(pc.is_in(splits, pa.array([GIVEN, HELD_OUT])))


def of_split(rows: pa.Table, split: Split) -> pa.Table:
    """Return the rows of a split, from a table with the column ``split``."""
    return rows.filter(is_sampled(rows["split"]) if split == "train" else pc.equal(rows["split"], split))


def rollout_counts(rows: pa.Table) -> dict[str, Any]:
    """Return the number of rollouts of each kind for a summary of a run; None for none."""
    names: dict[str, Split] = {"rollouts": "train", "given responses": GIVEN, "held-out rollouts": HELD_OUT}
    return {name: of_split(rows, split).num_rows or None for name, split in names.items()}
