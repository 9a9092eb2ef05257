"""Batches of rollouts in a checkpoint: each process writes its own part of them into one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cavesson.types import Batch, Rollouts, Turn

KeptBatches = Mapping[str, Sequence[Rollouts | None]]
"""Batches by what they are kept for; None for one that is not finished."""
_LISTS = "lists"


def write_batches(file: Path, batches: KeptBatches) -> None:
    """Write the parts of batches that this process has."""
    tensors = {
        # An algorithm may use one tensor under two names, which safetensors does not allow.
        f"{name}/{number}/{column}": tensor.detach().cpu().contiguous().clone()
        for name, parts in batches.items()
        for number, part in enumerate(parts)
        for column, tensor in (part.batch.columns if part is not None else {}).items()
    }
    lists = {name: [None if part is None else part.lists for part in parts] for name, parts in batches.items()}
    # As a tensor: safetensors limits texts in its metadata to 100 MB.
    tensors[_LISTS] = torch.frombuffer(bytearray(json.dumps(lists).encode()), dtype=torch.uint8)
    save_file(tensors, file)


def read_batches(files: Sequence[Path]) -> KeptBatches:
    """Return whole batches, in order of their samples, from the files of all processes; nothing without files."""
    parts = [_read(file) for file in files]
    names = parts[0].keys() if parts else ()
    return {name: [_joined(some) for some in zip(*(part[name] for part in parts), strict=True)] for name in names}


def _read(file: Path) -> dict[str, list[Rollouts | None]]:
    tensors = load_file(file)
    lists: dict[str, list[Any]] = json.loads(tensors[_LISTS].numpy().tobytes())
    return {name: [_part(one, tensors, f"{name}/{i}/") for i, one in enumerate(some)] for name, some in lists.items()}


def _part(lists: dict[str, list[Any]] | None, tensors: Mapping[str, Tensor], start: str) -> Rollouts | None:
    if lists is None:
        return None
    columns = {key.removeprefix(start): tensor for key, tensor in tensors.items() if key.startswith(start)}
    turns = [[Turn(*turn) for turn in of_episode] for of_episode in lists.get("turns", ())]
    return Rollouts(batch=Batch(_today(columns)), **{**lists, "turns": turns})


def _today(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return columns of a checkpoint with today's names: earlier versions had one mask for both uses."""
    if "mask" not in columns:
        return columns
    chosen = {"chosen": columns["learned"]} if "learned" in columns else {}
    mask = columns["mask"]
    rest = {name: column for name, column in columns.items() if name != "mask"}
    return rest | chosen | {"attended": mask, "learned": mask, "source": torch.zeros_like(mask, dtype=torch.int8)}


def _joined(parts: Sequence[Rollouts | None]) -> Rollouts | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    whole = Rollouts.joined(known)
    return whole if len(known) == 1 else whole.take(torch.tensor(whole.sample).argsort().tolist())
