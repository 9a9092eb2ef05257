"""NEFTune (arXiv:2310.05914): noise on the input embeddings during fine-tuning."""

from collections.abc import Callable

import torch
from torch import Tensor

from cavesson.models.sequences import Layout
from cavesson.randomness import Purpose, generator
from cavesson.types import Batch


def neftune(alpha: float, seed: int) -> Callable[[Tensor, Layout, Batch], Tensor]:
    """Return a function that adds uniform noise in ±α/√(L·H) to the L embeddings of width H of every example.

    This is algorithm 1 of the paper. The noise of an example depends only on the seed, the step and its row in the
    step's batch, given by the batch's columns `step` and `row`.
    """

    def disturb(embeddings: Tensor, layout: Layout, batch: Batch) -> Tensor:
        width = embeddings.shape[-1]
        noise = torch.zeros(embeddings.shape[:2].numel(), width)
        known = (batch.on_host[name].tolist() for name in ("step", "row", "length"))
        for step, row, length, place in zip(*known, layout.place, strict=True):
            bound = alpha / (length * width) ** 0.5
            drawn = generator(seed, Purpose.NEFTUNE, step, row).uniform(-bound, bound, (length, width))
            noise[place[:length]] = torch.from_numpy(drawn).float()
        return embeddings + noise.view_as(embeddings).to(embeddings)

    return disturb
