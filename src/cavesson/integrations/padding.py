"""Convert padded prompts to lists."""

from cavesson.record.precision import Array


def left_padded(ids: Array, mask: Array) -> list[list[int]]:
    """Return the rows of ``ids`` [B, S] without the entries where ``mask`` is 0."""
    return [row[kept.astype(bool)].tolist() for row, kept in zip(ids, mask, strict=True)]
