"""The ids of prompts: the hashes of their texts in hexadecimal digits, which are the same in every run."""

import numpy as np

from cavesson.index.columns import Array, text_hash
from cavesson.index.snapshot import Snapshot

PATTERN = r"^[0-9a-f]{16}$"
"""What an id looks like."""


def id_of(text: str) -> str:
    """Return the id of a prompt, given by its text."""
    return _written(text_hash(text.encode("utf-8", "surrogatepass")))


def ids_of(snapshot: Snapshot, rows: Array) -> list[str | None]:
    """Return the id of the prompt of each of some rows; None for rows without a prompt."""
    numbers = snapshot.raw("prompt")[rows]
    known = snapshot.prompts[np.maximum(numbers, 0)] if snapshot.state.prompts else numbers
    return [None if n < 0 else _written(h) for n, h in zip(numbers.tolist(), known.tolist(), strict=True)]


def ids_of_hashes(hashes: Array) -> list[str]:
    """Return the ids of some prompts, given by the hashes of their texts."""
    return [_written(one) for one in hashes.tolist()]


def numbers_of(snapshot: Snapshot, ids: list[str]) -> Array:
    """Return the numbers of the prompts with these ids in the index, without those that the run does not have."""
    wanted = [value - (1 << 64) if (value := int(one, 16)) >> 63 else value for one in ids]
    return np.flatnonzero(np.isin(snapshot.prompts, np.array(wanted, "<i8")))


def _written(value: int) -> str:
    return format(value & (1 << 64) - 1, "016x")
