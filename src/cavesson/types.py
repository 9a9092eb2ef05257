"""The batches passed between the stages of a training step.

Legend for all shapes: P prompts, G samples per prompt, B sequences (P × G), S prompt tokens, T response tokens,
V vocabulary size, H hidden size, N flattened tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Named tensors that share their first axis: one row per sequence.

    Rollouts: prompts are padded on the left, `[B, S]`; everything about responses is padded on the right, `[B, T]`, and
    position t of every `[B, T]` column refers to response token t.

    Examples: `ids` and `mask`, `[B, L]`, are padded on the right; `mask` is 1 on the learned tokens, and `length`
    `[B]` counts the tokens. Pairs have two of each, `chosen_…` and `rejected_…`.
    """

    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self.columns[name]
        except KeyError:
            raise KeyError(f"no column {name!r}; there are {sorted(self.columns)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def with_columns(self, **new: Tensor) -> "Batch":
        return Batch({**self.columns, **new})

    def take(self, rows: Tensor) -> "Batch":
        """Return the rows at these indices, in this order, with the padding trimmed to the longest of them."""
        return Batch({name: column[rows] for name, column in self.columns.items()})._trimmed()

    def to(self, device: torch.device) -> "Batch":
        return Batch({name: column.to(device) for name, column in self.columns.items()})

    def split(self, size: int) -> Iterator["Batch"]:
        for start in range(0, len(self), size):
            yield self.take(torch.arange(start, min(start + size, len(self))))

    def _trimmed(self) -> "Batch":
        if not any(name.endswith(("mask", "length")) for name in self.columns if name != "prompt_mask"):
            return self
        return Batch({name: self._cut(name, column) for name, column in self.columns.items()})

    def _cut(self, name: str, column: Tensor) -> Tensor:
        if column.ndim == 1:
            return column
        # At least one column is kept even if all sequences are empty, so that no tensor has an axis of size zero.
        if name.startswith("prompt_"):
            return column[:, column.shape[1] - max(1, int(self["prompt_mask"].sum(1).max())) :]
        side = next((side for side in ("chosen_", "rejected_") if name.startswith(side)), "")
        lengths = self[f"{side}length"] if f"{side}length" in self else self["mask"].sum(1)
        width = int(lengths.max())
        return column[:, : max(1, width)]


def stacked(columns: list[Tensor], name: str) -> Tensor:
    """Concatenate tensors of one column along the rows, padded on the side on which the column is padded."""
    if columns[0].ndim == 1:
        return torch.cat(columns)
    width = max(column.shape[1] for column in columns)
    missing = [width - column.shape[1] for column in columns]
    pads = [(n, 0) if name.startswith("prompt_") else (0, n) for n in missing]
    return torch.cat([torch.nn.functional.pad(column, pad) for column, pad in zip(columns, pads, strict=True)])
