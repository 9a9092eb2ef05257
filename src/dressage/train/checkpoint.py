"""What a killed run continues from: complete or absent, in safetensors and JSON only."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dressage.errors import UserError, is_disk_full

_NAME = "step-{:08d}"
_INSIDE = "-update-{:08d}"  # sorts after the checkpoint before the step and before the one after it


class Checkpoint(NamedTuple):
    """The state of a run between two steps, or inside one."""

    step: int
    """the next step to do, or the one that is being done"""
    state: dict[str, Any]
    """everything that is no tensor: KL coefficient, running moments"""
    weights: dict[str, Tensor]
    """the trainable parameters by name"""
    optimizer: dict[str, Tensor]
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    """the data that the step works on, of a checkpoint inside one"""

    @property
    def name(self) -> str:
        inside = _INSIDE.format(len(self.state["updates"])) if self.tensors else ""
        return _NAME.format(self.step) + inside


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint under `folder`/checkpoints and remove all but the newest `keep`.

    It is written under a temporary name and renamed when it is on disk, so a kill leaves the one before.
    """
    place = folder / "checkpoints"
    final = place / checkpoint.name
    temporary = place / f".{final.name}.{os.getpid()}"
    try:
        for left_over in place.glob(".step-*"):  # of a killed process
            shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
        save_file(_plain(checkpoint.weights), temporary / "weights.safetensors")
        save_file(_plain(checkpoint.optimizer), temporary / "optimizer.safetensors")
        if checkpoint.tensors:
            save_file(_plain(checkpoint.tensors), temporary / "tensors.safetensors")
        state = json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=1)
        (temporary / "state.json").write_text(state, encoding="utf-8")
        for file in temporary.iterdir():
            _sync(file)
        temporary.rename(final)
        _sync(place)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_disk_full(error):
            raise UserError(
                f"the disk is full: no room for a checkpoint in {place}; free space, then go on with --resume {folder}"
            ) from error
        raise
    for old in _complete(place)[:-keep]:
        shutil.rmtree(old)
    return final


def latest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint of a run, or None."""
    complete = _complete(folder / "checkpoints")
    if not complete:
        return None
    state = json.loads((complete[-1] / "state.json").read_text(encoding="utf-8"))
    tensors = complete[-1] / "tensors.safetensors"
    return Checkpoint(
        state.pop("step"),
        state,
        load_file(complete[-1] / "weights.safetensors"),
        load_file(complete[-1] / "optimizer.safetensors"),
        load_file(tensors) if tensors.exists() else {},
    )


def _complete(place: Path) -> list[Path]:
    return sorted(place.glob("step-*"))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
