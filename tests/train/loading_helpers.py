"""Called in every process: sharded models that are loaded slice by slice, beside the same models as a whole."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from train_helpers import quiet, tiny_run

from cavesson.models.mapped import is_mapped
from cavesson.train import build
from cavesson.train.run import Training


def compare(cases: dict[str, tuple[bool, dict[str, Any]]], folder: Path) -> None:
    """Build each run, sharded and not; `mapped` says whether its weights are to stay in their files meanwhile."""
    placed = build._placed
    seen = []

    def watched(role: Any, processes: Any) -> Any:
        seen.append(is_mapped(role))
        return placed(role, processes)

    build._placed = watched
    for name, (mapped, case) in cases.items():
        runs = []
        for shard in ("none", "full"):
            changes = {**case, "parallel__shard": shard}
            if shard == "none":
                changes.pop("parallel__offload", None)
            runs.append(tiny_run(changes.pop("algorithm"), folder / f"{name}-{shard}", **changes))
        assert seen == [False, mapped], name
        notes = [[note for note in run.trainer.notes() if "reads the whole" in note] for run in runs]
        said = [] if mapped else ["every process reads the whole model before sharding"]
        assert notes[0] == [] and [note.split(" (")[0] for note in notes[1]] == said, name
        assert offloaded(runs[1]) == bool(case.get("parallel__offload")), name
        seen.clear()
        assert runs[0].trainer.fingerprint == runs[1].trainer.fingerprint, name
        whole, sharded = map(tensors, runs)
        assert whole.keys() == sharded.keys(), name
        for key, tensor in whole.items():
            assert tensor.isfinite().all() and torch.equal(tensor, sharded[key]), (name, key)


def offloaded(training: Training) -> bool:
    """Whether FSDP keeps the weights in the memory of the host, which on CPU no other number shows."""
    role: Any = training.trainer.learner.model
    return all(one.offload_to_cpu for one in role._get_fsdp_state()._fsdp_param_group.fsdp_params)


def tensors(training: Training) -> dict[str, Tensor]:
    """All weights and buffers of what learns and of its reference."""
    role: Any = training.trainer.learner.model
    found = {}
    for name, module in {"role": role, "reference": getattr(role, "frozen_reference", None)}.items():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()] if module is not None else ():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[f"{name} {key}"] = whole.detach().float()
    return found


@contextmanager
def peak() -> Iterator[list[float]]:
    """Yield a list that holds the largest growth of this process's own memory inside the block, in MB."""
    before, found, is_done = own_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not is_done.is_set():
            found[0] = max(found[0], own_memory() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        is_done.set()
        thread.join()


def own_memory() -> float:
    """Without the pages of files, which the system can take back."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def measure(folder: Path, **changes: Any) -> None:
    """Load a model, train it for a step and save it; print the growth of memory in loading and in saving."""
    tiny_run("sft", folder / "first", steps=1).run(quiet)  # imports what there is to import
    with peak() as loading:
        training = tiny_run("sft", folder / "run", steps=1, checkpoint__every=1, **changes)
    trainer = training.trainer
    whole_model = trainer.whole_model
    saving = [0.0]

    def watched() -> Any:
        with peak() as found:
            model = whole_model()
        saving[:] = found
        return model

    trainer.whole_model = watched  # type: ignore[method-assign]
    training.run(quiet)
    print("grew", loading[0], saving[0])
