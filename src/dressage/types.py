"""What flows between the stages.

One legend everywhere: P prompts, G samples per prompt, B sequences (P × G), S prompt tokens, T response tokens,
V vocabulary, H hidden size, N flattened tokens.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Named tensors that share their first axis: one row per sequence.

    Prompts are padded on the left, `[B, S]`; everything about responses is padded on the right, `[B, T]`, and
    position t of every `[B, T]` column speaks of response token t.
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
        """The rows at these indices, in this order, with padding that no row needs cut off."""
        return Batch({name: column[rows] for name, column in self.columns.items()})._trimmed()

    def to(self, device: torch.device) -> "Batch":
        return Batch({name: column.to(device) for name, column in self.columns.items()})

    def split(self, size: int) -> Iterator["Batch"]:
        for start in range(0, len(self), size):
            yield self.take(torch.arange(start, min(start + size, len(self))))

    def _trimmed(self) -> "Batch":
        if "mask" not in self:
            return self
        # One column is kept even of an all-empty batch, so that no tensor has a zero axis.
        width = max(1, int(self["mask"].sum(1).max()))
        skip = self["prompt_mask"].shape[1] - max(1, int(self["prompt_mask"].sum(1).max()))
        cut = {
            name: column[:, skip:] if name.startswith("prompt_") else column[:, :width] if column.ndim == 2 else column
            for name, column in self.columns.items()
        }
        return Batch(cut)
