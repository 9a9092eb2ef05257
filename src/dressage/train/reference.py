"""Log-probabilities of a frozen reference over pairs: computed once, before training, and kept in the run's folder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dressage.data.examples import Examples, size_of
from dressage.data.order import InMemory, Mixed
from dressage.data.tokens import PairTokens
from dressage.errors import UserError
from dressage.train.processes import Processes

_FILE = "reference.safetensors"


def with_reference(
    examples: Examples[PairTokens], model: nn.Module, processes: Processes, folder: Path, step: int, at_once: int
) -> Examples[PairTokens]:
    """Give every pair the log-probabilities of both of its responses under `model`.

    The reference is needed for nothing else, so its weights need not stay in memory beside the policy's.

    Args:
        examples: pairs, in memory.
        model: a `PairPolicy` over the reference.
        processes: each scores its share.
        folder: the run's, where the numbers are kept for a resume.
        step: the next step; after the first one the policy is no longer its own reference.
        at_once: pairs in memory at a time.

    Raises:
        UserError: the kept numbers are gone, or belong to other data.
    """
    train, held_out = examples.train, examples.held_out
    assert isinstance(train, InMemory | Mixed), "DPORun refuses streams"
    pairs = [*train.items, *held_out]
    path = folder / _FILE
    if path.exists():
        scores = load_file(path)["scores"]
        if len(scores) != len(pairs):
            raise UserError(f"{path} has {len(scores)} pairs, the data {len(pairs)}: it has changed since the start")
    elif step:
        raise UserError(f"{path} is missing: the reference's log-probabilities cannot be computed after the first step")
    else:
        scores = _score(pairs, examples, model, processes, at_once)
        if processes.is_main:
            temporary = path.with_suffix(".tmp")
            save_file({"scores": scores}, temporary)
            temporary.rename(path)
        processes.wait()
    known = [replace(pair, reference=tuple(row)) for pair, row in zip(pairs, scores.tolist(), strict=True)]
    return examples.with_data(train.with_items(known[: train.size]), known[train.size :])


@torch.no_grad()
def _score(
    pairs: Sequence[PairTokens], examples: Examples[PairTokens], model: nn.Module, processes: Processes, at_once: int
) -> Tensor:
    """Summed log-probabilities `[N, 2]` of chosen and rejected."""
    device = next(model.parameters()).device
    share = processes.share(len(pairs))
    order = sorted(share, key=lambda i: size_of(pairs[i]))
    scores = torch.zeros(len(pairs), 2)
    for start in range(0, len(order), at_once):
        rows = order[start : start + at_once]
        seen = model(examples.collate([pairs[i] for i in rows]).to(device))
        scores[rows] = torch.stack([seen.chosen, seen.rejected], dim=1).cpu()
    return processes.sum_tensor(scores)
