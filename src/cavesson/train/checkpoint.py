"""What a killed run continues from: complete or absent, in safetensors and JSON only, and checked when it is read."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cavesson.errors import NoRoomError, UserError, first_line, no_room

_NAME = "step-{:08d}"
_INSIDE = "-update-{:08d}"  # sorts after the checkpoint before the step and before the one after it
_REPLACED = "-replaced"  # sorts after the checkpoint that replaces it, which removes what is later than itself
_CHECKSUMS = "checksums.json"
_PIECE = 16 << 20
"""Bytes of a file that are in memory while its checksum is computed."""


class _DamagedError(Exception):
    """A checkpoint is not what was written."""


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

    It is written under a temporary name and renamed when it is on disk, so a kill leaves the one before. One that has
    the same name already, as where a reward fails right after a checkpoint was due, is kept until then as well. Later
    ones, which the run has gone back from because they were damaged, are removed too.
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
        checksums = {file.name: _checksum(file) for file in sorted(temporary.iterdir())}
        (temporary / _CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
        for file in temporary.iterdir():
            _sync(file)
        _rename(temporary, final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        room = no_room(error)
        if room is not None:
            raise NoRoomError(f"{room.reason}: no room for a checkpoint in {place}; {room.advice}") from error
        raise
    for later in (old for old in _complete(place) if old.name > final.name):
        _remove(later)
    for old in _complete(place)[:-keep]:
        _remove(old)
    return final


def _rename(temporary: Path, final: Path) -> None:
    """Give a checkpoint its name; one that has it gets another, by which it still counts if a kill comes in between."""
    if final.exists():
        replaced = final.with_name(f"{final.name}{_REPLACED}")
        if replaced.exists():  # a kill came after the one that has the name now was complete
            _remove(replaced)
        final.rename(replaced)
    temporary.rename(final)
    _sync(final.parent)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint; it is hidden first, so that what a kill leaves of it is not taken for a damaged one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def latest(folder: Path, say: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """The newest intact checkpoint of a run, or None if it has no checkpoint.

    Args:
        folder: of the run.
        say: is told, in a line, of damaged checkpoints that are passed over.

    Raises:
        UserError: there are checkpoints, and all of them are damaged.
    """
    damaged: list[str] = []
    for place in reversed(_complete(folder / "checkpoints")):
        try:
            checkpoint = _read(place)
        except _DamagedError as error:
            damaged.append(f"{place.name} ({error})")
            continue
        if damaged:
            say(f"damaged in {folder / 'checkpoints'}: {', '.join(damaged)}; the run goes on from {place.name}")
        return checkpoint
    if damaged:
        raise UserError(
            f"every checkpoint in {folder / 'checkpoints'} is damaged: {', '.join(damaged)}; "
            "put back a copy, or remove that folder to begin again at step 0"
        )
    return None


def _read(place: Path) -> Checkpoint:
    try:
        _verify(place)
        state = json.loads((place / "state.json").read_bytes())
        tensors = place / "tensors.safetensors"
        return Checkpoint(
            state.pop("step"),
            state,
            load_file(place / "weights.safetensors"),
            load_file(place / "optimizer.safetensors"),
            load_file(tensors) if tensors.exists() else {},
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise _DamagedError(first_line(error)) from error


def _verify(place: Path) -> None:
    """Compare the files with the checksums that were written beside them."""
    if not (place / _CHECKSUMS).exists():
        raise _DamagedError(f"{_CHECKSUMS} is missing")
    for name, checksum in json.loads((place / _CHECKSUMS).read_bytes()).items():
        if not (place / name).exists():
            raise _DamagedError(f"{name} is missing")
        if _checksum(place / name) != checksum:
            raise _DamagedError(f"{name} is not what was written")


def _checksum(path: Path) -> str:
    """XXH3 of a file, 128 bits: it finds any damage by accident, at the speed of memory."""
    digest = xxhash.xxh3_128()
    piece = memoryview(bytearray(_PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _complete(place: Path) -> list[Path]:
    return sorted(place.glob("step-*"))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows opens no folders, and keeps its own log of names
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows writes out only what may be written
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
