"""What a turn of an episode has read, so that the next turn reads only what came after it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class ReadRow(NamedTuple):
    """The first N tokens of a row, which a model has read."""

    ids: list[int]
    layers: list[tuple[Tensor, Tensor]]
    """their keys and values in each layer, `[H, N, D]`"""

    def reusable(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a prompt need not be read again; its last one must be, for the logits after it."""
        return min(len(self.ids), len(ids) - 1) if list(ids[: len(self.ids)]) == self.ids else 0


def unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    """Return the tokens of rows `[B, S]` that are padded on the left."""
    lengths = mask.sum(1).long().tolist()
    return [row[len(row) - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]


def read_row(cache: Any, row: int, start: int, ids: list[int]) -> ReadRow:
    """Copy what a cache that keeps tokens only has of a row, whose tokens `ids` begin in the column `start`."""
    columns = slice(start, start + len(ids))
    return ReadRow(ids, [tuple(x[row, :, columns].clone() for x in (one.keys, one.values)) for one in cache.layers])


def load(cache: Any, ids: Tensor, mask: Tensor, rows: Sequence[ReadRow | None]) -> int:
    """Put what has been read of prompts into an empty `StaticCache` that keeps tokens only.

    All rows read the same number of last columns: those that the row with the most unread tokens needs. So their tokens
    are where they are without this. The prompts `ids`, `[P, S]`, are padded on the left, where `mask` is 0.

    Return how many columns that fills.
    """
    prompts = unpadded(ids, mask)
    reusable = [row.reusable(prompt) if row else 0 for row, prompt in zip(rows, prompts, strict=True)]
    unread = max(len(prompt) - some for prompt, some in zip(prompts, reusable, strict=True))
    filled = ids.shape[1] - unread
    if filled == 0:
        return 0
    used = [max(0, len(prompt) - unread) for prompt in prompts]
    like = rows[used.index(filled)]  # the longest prompt; a row of which nothing is used may not have been read at all
    for layer in range(len(cache.layers)):
        parts = [
            [pad(x[:, :some], (0, 0, filled - some, 0)) for x in (row or like).layers[layer]]  # type: ignore[union-attr]
            for row, some in zip(rows, used, strict=True)
        ]
        keys, values = (torch.stack(each) for each in zip(*parts, strict=True))
        cache.update(keys, values, layer)
    return filled
