"""Checkpoints, from which a run resumes: written atomically as safetensors and JSON, and verified when read."""

import hashlib
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
_REPLACED = "-replaced"  # sorts after the checkpoint that replaces it, which removes all later ones
_CHECKSUMS = "checksums.json"
FORMAT = 3
"""Number of the layout of a checkpoint's files and state; a version with another layout cannot read it."""


class _DamagedError(Exception):
    """The files of a checkpoint differ from what was written."""


class Checkpoint(NamedTuple):
    """The state of a run between two steps, or inside one."""

    step: int
    """the next step to do, or the one that is being done"""
    state: dict[str, Any]
    """everything that is no tensor: KL coefficient, running moments"""
    weights: dict[str, Tensor]
    """the trainable parameters by name, in float32"""
    optimizer: dict[str, Tensor]
    tensors: Mapping[str, Tensor] = MappingProxyType({})
    """the data that the step works on, of a checkpoint inside one, and the data of later steps"""

    @property
    def name(self) -> str:
        inside = _INSIDE.format(len(self.state["updates"])) if "updates" in self.state else ""
        return _NAME.format(self.step) + inside


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint to `folder`/checkpoints and remove all but the newest `keep`.

    The checkpoint is written under a temporary name and renamed when it is on disk, so that the previous one remains if
    the process is killed. An existing checkpoint with the same name is also kept until then; this occurs if a reward
    fails right after a checkpoint was due. Later checkpoints, which were damaged so that the run resumed from an
    earlier one, are removed too.

    Raises:
        NoRoomError: there is no room for the checkpoint.
    """
    place = folder / "checkpoints"
    final = place / checkpoint.name
    temporary = place / f".{final.name}.{os.getpid()}"
    try:
        for left_over in place.glob(".step-*"):  # left over by a killed process
            shutil.rmtree(left_over)
        temporary.mkdir(parents=True)
        save_file(_plain(checkpoint.weights), temporary / "weights.safetensors")
        save_file(_plain(checkpoint.optimizer), temporary / "optimizer.safetensors")
        if checkpoint.tensors:
            save_file(_plain(checkpoint.tensors), temporary / "tensors.safetensors")
        state = json.dumps({"format": FORMAT, "step": checkpoint.step, **checkpoint.state}, indent=1)
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
    """Rename a checkpoint to its final name.

    An existing one with that name is renamed first; it can still be read if the process is killed in between.
    """
    if final.exists():
        replaced = final.with_name(f"{final.name}{_REPLACED}")
        if replaced.exists():  # an earlier process was killed after the current `final` was complete
            _remove(replaced)
        final.rename(replaced)
    temporary.rename(final)
    _sync(final.parent)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, hiding it first, so that its remains after a kill are not mistaken for a damaged one."""
    hidden = checkpoint.with_name(f".{checkpoint.name}")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def latest(folder: Path, say: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run, or None if it has no checkpoint.

    Args:
        folder: of the run.
        say: called with one line about damaged checkpoints that are skipped.

    Raises:
        UserError: there are checkpoints, and all of them are damaged, or the newest has another format.
    """
    damaged: list[str] = []
    for place in reversed(_complete(folder / "checkpoints")):
        try:
            checkpoint = _read(place)
        except _DamagedError as error:
            damaged.append(f"{place.name} ({error})")
            continue
        if damaged:
            say(f"damaged in {folder / 'checkpoints'}: {', '.join(damaged)}; the run resumes from {place.name}")
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
        _check_format(state.pop("format", 1), place)
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


def _check_format(number: int, place: Path) -> None:
    if number != FORMAT:
        raise UserError(
            f"{place} has format {number}, and this version of Cavesson reads format {FORMAT}: "
            "resume with the version that wrote it, or start again in another folder"
        )


def _verify(place: Path) -> None:
    """Compare the files with their saved checksums.

    Raises:
        _DamagedError: a file is missing or differs.
    """
    if not (place / _CHECKSUMS).exists():
        raise _DamagedError(f"{_CHECKSUMS} is missing")
    for name, checksum in json.loads((place / _CHECKSUMS).read_bytes()).items():
        if not (place / name).exists():
            raise _DamagedError(f"{name} is missing")
        if _checksum(place / name) != checksum:
            raise _DamagedError(f"{name} does not match its checksum")


def _checksum(path: Path) -> str:
    """Return the 128-bit XXH3 hash of a file, which detects accidental damage at memory speed."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _complete(place: Path) -> list[Path]:
    return sorted(place.glob("step-*"))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and journals their changes itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs only writable files
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
