"""How the rows of a batch are split into micro-batches: by their number, or by their tokens."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cavesson.algorithms.settings import OptimizeSettings
from cavesson.ops.packing import fill
from cavesson.processes import Processes
from cavesson.types import Batch


def micro_batches(
    role: Any, processes: Processes, batch: Batch, rows: Sequence[int], settings: OptimizeSettings, usual: int = 0
) -> list[list[int]]:
    """Split rows of a batch of this process, which has their lengths; all processes must call this together.

    `role` is the model that will read them, which may pad. Settings that do not say otherwise give micro-batches of
    `usual` rows; 0 = all.
    """
    if settings.most_tokens is None:
        return processes.micro_batches(rows, settings.micro_batch_size or usual)
    parts = lengths(batch, role.pads)[list(rows)].tolist()
    filled = fill(parts, settings.most_tokens, role.pads)
    return processes.equally_many([[rows[index] for index in members] for members in filled])


def lengths(batch: Batch, padded: bool) -> Tensor:
    """Return how many tokens each part of the rows has, as far as it is padded by itself: `[B, parts]`."""
    if "prompt_mask" in batch:
        return torch.stack([batch["prompt_mask"].sum(1), batch["attended"].sum(1).long()], 1)
    if "length" in batch:
        return batch["length"][:, None]
    sides = [batch["chosen_length"], batch["rejected_length"]]
    return torch.stack([torch.maximum(*sides)] * 2 if padded else sides, 1)
