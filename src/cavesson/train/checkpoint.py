"""Checkpoints, from which a run resumes: written atomically as safetensors and JSON, and verified when read."""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from cavesson.errors import NoRoomError, UserError, first_line, no_room
from cavesson.models.sharding import Slices, is_first_copy, offset
from cavesson.processes import Processes
from cavesson.train.kept import KeptBatches, read_batches, write_batches

T = TypeVar("T")

_NAME = "step-{:08d}"
_INSIDE = "-update-{:08d}"  # sorts after the checkpoint before the step and before the one after it
_IS_BETWEEN, _IS_INSIDE = re.compile(r"step-(\d+)"), re.compile(r"step-\d+-update-\d+")
_REPLACED = "-replaced"  # sorts after the checkpoint that replaces it, which removes all later ones
_CHECKSUMS = "checksums.json"
_SLICES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Where the slices in a file begin, in its metadata; these names let torch.distributed.checkpoint read it too."""
FORMAT = 6
"""Number of the layout of a checkpoint's files and state; a version with another layout cannot read it."""


class _DamagedError(Exception):
    """The files of a checkpoint differ from what was written."""


class Checkpoint(NamedTuple):
    """The state of a run between two steps, or inside one."""

    step: int
    """the next step to do, or the one that is being done"""
    state: dict[str, Any]
    """everything that is not a tensor: KL coefficient, running moments"""
    weights: Mapping[str, Any]
    """the trainable parameters by name, in float32; each is a `Tensor`, which may be sharded when it is written, or
    `Slices` when it is read"""
    optimizer: Mapping[str, Any]
    batches: KeptBatches = MappingProxyType({})
    """the rollouts that the step works on, of a checkpoint inside one, and those of later steps; of this process when
    they are written, and of all processes when they are read"""

    @property
    def name(self) -> str:
        inside = _INSIDE.format(len(self.state["updates"])) if "updates" in self.state else ""
        return _NAME.format(self.step) + inside


def save(folder: Path, checkpoint: Checkpoint, keep: int, processes: Processes) -> Path:
    """Write a checkpoint to `folder`/checkpoints; keep the newest `keep` between steps, and the newest inside a step.

    All processes must call this together. Each of them writes its own rollouts and, if weights are sharded, its own
    slices; the main process writes everything else.

    The checkpoint is written under a temporary name and renamed when it is on disk, so that the previous one remains if
    a process is killed. An existing checkpoint with the same name is also kept until then; this occurs if a reward
    fails right after a checkpoint was due. Later checkpoints, which were damaged so that the run resumed from an
    earlier one, are removed too.

    Raises:
        NoRoomError: there is no room for the checkpoint.
    """
    place = folder / "checkpoints"
    final = place / checkpoint.name
    temporary = processes.of_main(place / f".{final.name}.{os.getpid()}")
    is_main = processes.is_main
    try:
        _together(processes, place, lambda: _begin(temporary) if is_main else None)
        own = _together(processes, place, lambda: _write_own(temporary, checkpoint, processes))
        sums = {name: checksum for part in processes.of_all(own) for name, checksum in part.items()}
        _together(processes, place, lambda: _finish(temporary, final, checkpoint, sums) if is_main else None)
    except UserError:
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if is_main:
        for later in (old for old in _complete(place) if old.name > final.name):
            _remove(later)
        for old in _outdated(_complete(place), keep):
            _remove(old)
    processes.wait()
    return final


def _together(processes: Processes, place: Path, action: Callable[[], T]) -> T:
    """Call an action that writes a checkpoint in `place`, and return its result; an error in one process ends all."""

    def told() -> T:
        try:
            return action()
        except (OSError, SafetensorError) as error:
            room = no_room(error)
            if room is None:
                raise UserError(f"cannot write a checkpoint in {place}: {first_line(error)}") from error
            raise NoRoomError(f"{room.reason}: no room for a checkpoint in {place}; {room.advice}") from error

    return processes.agreed(told)


def _begin(temporary: Path) -> None:
    for left_over in temporary.parent.glob(".step-*"):  # left over by a killed process
        shutil.rmtree(left_over)
    temporary.mkdir(parents=True)


def _write_own(temporary: Path, checkpoint: Checkpoint, processes: Processes) -> dict[str, str]:
    """Write what this process has of weights, optimiser's state and rollouts; return its files' checksums."""
    is_sharded = processes.mesh is not None
    number = f"-{processes.rank:05d}"
    files = []
    for kind, tensors in (("weights", checkpoint.weights), ("optimizer", checkpoint.optimizer)):
        own = {name: tensor for name, tensor in tensors.items() if _is_mine(tensor, processes)}
        if own or processes.is_main:
            files.append(temporary / f"{kind}{number if is_sharded else ''}.safetensors")
            offsets = {name: {_OFFSETS: offset(tensor)} for name, tensor in own.items()}
            save_file(_plain(own), files[-1], {_SLICES: json.dumps(offsets)} if is_sharded else None)
    if any(checkpoint.batches.values()):
        files.append(temporary / f"rollouts{number if processes.count > 1 else ''}.safetensors")
        write_batches(files[-1], checkpoint.batches)
    for file in files:
        _sync(file)
    return {file.name: _checksum(file) for file in files}


def _is_mine(tensor: Tensor, processes: Processes) -> bool:
    """Return whether this process writes a tensor: its slice, of which others may have copies, or a whole one."""
    if isinstance(tensor, DTensor):
        return is_first_copy(tensor) and tensor.to_local().numel() > 0
    return processes.is_main


def _finish(temporary: Path, final: Path, checkpoint: Checkpoint, checksums: dict[str, str]) -> None:
    """Write the rest of a checkpoint, whose weights and rollouts are on disk, and give it its name."""
    state = json.dumps({"format": FORMAT, "step": checkpoint.step, **checkpoint.state}, indent=1)
    (temporary / "state.json").write_text(state, encoding="utf-8")
    rest = [file for file in sorted(temporary.iterdir()) if file.name not in checksums]
    checksums = checksums | {file.name: _checksum(file) for file in rest}
    (temporary / _CHECKSUMS).write_text(json.dumps(checksums, indent=1, sort_keys=True), encoding="utf-8")
    for file in (*rest, temporary / _CHECKSUMS):
        _sync(file)
    _rename(temporary, final)


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

    `say` is called with one line about damaged checkpoints that are skipped.

    Raises:
        UserError: there are checkpoints, and all of them are damaged, one cannot be read, or the newest has another
            format.
    """
    place = _newest_intact(folder, say)
    return None if place is None else _read(place)


def latest_of_all(folder: Path, say: Callable[[str], None], processes: Processes) -> Checkpoint | None:
    """Return the newest intact checkpoint, as `latest`; all processes must call this together.

    The main process chooses it and verifies its files, so that all resume from the same one.
    """
    place = processes.of_main(processes.agreed(lambda: _newest_intact(folder, say) if processes.is_main else None))
    return None if place is None else processes.agreed(lambda: _read(place))


def _newest_intact(folder: Path, say: Callable[[str], None]) -> Path | None:
    damaged: list[str] = []
    for place in reversed(_complete(folder / "checkpoints")):
        try:
            _verify(place)
        except _DamagedError as error:
            damaged.append(f"{place.name} ({first_line(error)})")
            continue
        except OSError as error:
            # What could not be read may be intact, but the next save would remove it as damaged.
            raise UserError(f"cannot read the checkpoint {place}: {first_line(error)}; try again") from error
        if damaged:
            say(f"damaged in {folder / 'checkpoints'}: {', '.join(damaged)}; the run resumes from {place.name}")
        return place
    if damaged:
        raise UserError(
            f"every checkpoint in {folder / 'checkpoints'} is damaged: {', '.join(damaged)}; "
            "put back a copy, or remove that folder to begin again at step 0"
        )
    return None


def _read(place: Path) -> Checkpoint:
    try:
        state = json.loads((place / "state.json").read_bytes())
        _check_format(state.pop("format", 1), place)
        return Checkpoint(
            state.pop("step"),
            state,
            _load(place, "weights"),
            _load(place, "optimizer"),
            read_batches(sorted(place.glob("rollouts*.safetensors"))),
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"cannot read the checkpoint {place}: {first_line(error)}") from error


def _load(place: Path, kind: str) -> dict[str, Tensor | Slices]:
    """Return the tensors of a kind; nothing of them is read until it is used."""
    files = sorted(place.glob(f"{kind}*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{kind}.safetensors is missing")
    found: dict[str, dict[int, Tensor]] = {}
    for file in files:
        with safe_open(file, framework="pt") as header:
            offsets = json.loads((header.metadata() or {}).get(_SLICES, "{}"))
        for name, tensor in load_file(file).items():
            row = offsets[name][_OFFSETS][0] if tensor.ndim and offsets else 0
            found.setdefault(name, {})[row] = tensor
    ordered = {name: tuple(rows[row] for row in sorted(rows)) for name, rows in found.items()}
    return {name: parts[0] if len(parts) == 1 else Slices(parts) for name, parts in ordered.items()}


def _check_format(number: int, place: Path) -> None:
    if number != FORMAT:
        raise UserError(
            f"{place} has format {number}, and this version of Cavesson reads format {FORMAT}: "
            "resume with the version that wrote it, or start again in another folder"
        )


def _verify(place: Path) -> None:
    """Compare the files with their saved checksums; raise _DamagedError if one is missing or differs."""
    try:
        for name, checksum in json.loads((place / _CHECKSUMS).read_bytes()).items():
            if _checksum(place / name) != checksum:
                raise _DamagedError(f"{name} does not match its checksum")
    except FileNotFoundError as error:
        raise _DamagedError(f"{Path(error.filename).name} is missing") from error
    except ValueError as error:
        raise _DamagedError(f"{_CHECKSUMS}: {first_line(error)}") from error


def _checksum(path: Path) -> str:
    """Return the 128-bit XXH3 hash of a file, which detects accidental damage at memory speed."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def between_steps(folder: Path) -> list[int]:
    """Return the steps before which a run has a complete checkpoint, in ascending order."""
    found = (_IS_BETWEEN.fullmatch(path.name) for path in _complete(folder / "checkpoints"))
    return [int(match[1]) for match in found if match]


def _outdated(checkpoints: Sequence[Path], keep: int) -> list[Path]:
    """Return all checkpoints, in order, but the newest `keep` between steps and the newest inside a step."""
    between, inside = ([p for p in checkpoints if kind.fullmatch(p.name)] for kind in (_IS_BETWEEN, _IS_INSIDE))
    return [path for path in checkpoints if path not in (*between[-keep:], *inside[-1:])]


def place_of(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint before a step."""
    return folder / "checkpoints" / _NAME.format(step)


def _complete(place: Path) -> list[Path]:
    return sorted(place.glob("step-*"))


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what this process has of tensors, as files can hold it."""
    own = {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in own.items()}


def _sync(path: Path) -> None:
    if sys.platform == "win32" and path.is_dir():
        return  # Windows cannot open folders, and journals their changes itself
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)  # Windows syncs only writable files
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
