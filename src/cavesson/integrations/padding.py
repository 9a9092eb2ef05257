"""Padded prompts as lists."""

from cavesson.record.precision import Array


def left_padded(ids: Array, mask: Array) -> list[list[int]]:
    """Returns the rows of ``ids`` [B, S] without what ``mask`` leaves out."""
    return [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
