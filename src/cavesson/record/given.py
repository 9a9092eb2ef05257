"""What a caller gives a recorder, and its checks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cavesson.record.precision import Array
from cavesson.record.schema import ROW_COLUMNS, TOKEN_COLUMNS
from cavesson.record.statistics import STATISTICS

FILLED_IN = {"step", "attempt", "rank", *STATISTICS}
GIVEN_ROWS = {column.name: column for column in ROW_COLUMNS if column.name not in FILLED_IN}
GIVEN_TOKENS = [column.name for column in TOKEN_COLUMNS if column.name not in ("step", "sample", "position")]


def check_names(what: str, given: Mapping[str, Any], known: Iterable[str], required: set[str]) -> None:
    if unknown := given.keys() - set(known):
        raise ValueError(f"{what} have no column {min(unknown)!r}; known: {', '.join(known)}")
    if missing := required - given.keys():
        raise ValueError(f"{what} are missing the required column {min(missing)!r}")


def check_shapes(rows: Mapping[str, Sequence[Any] | Array], tokens: Mapping[str, Array]) -> None:
    mask, samples = tokens["mask"], rows["sample"]
    if not isinstance(mask, np.ndarray):
        raise ValueError("mask is not an array, expected bool [B, T]; with a list of tokens per response, leave it out")
    if mask.ndim != 2 or mask.dtype != np.bool_:
        raise ValueError(f"mask is {mask.dtype} of shape {mask.shape}, expected bool [B, T]")
    for name, values in rows.items():
        if len(values) != len(mask):
            raise ValueError(f"rows column {name!r} has {len(values)} entries, mask has {len(mask)}")
    for name, array in tokens.items():
        if array.shape != mask.shape:
            raise ValueError(f"tokens column {name!r} has shape {array.shape}, mask has {mask.shape}")
    if len(np.unique(np.asarray(samples))) != len(samples):
        raise ValueError("rows column 'sample' names a rollout twice; with step it is the key")
