"""The choice of the ways in which a run computes its passes."""

from cavesson.models.compiled import Compile, compiler
from cavesson.models.passes import Role, Ways, use
from cavesson.models.settings import ModelSettings
from cavesson.processes import Processes


def compiler_of(settings: ModelSettings, processes: Processes) -> Compile | None:
    """Return what compiles the models of a run, for learning and for sampling, or None if nothing is compiled.

    A CPU computes plainly, so that a run has the same bits on all machines with its products.
    """
    is_compiled = processes.device.type == "cuda" and processes.mesh is None and compiles(settings)
    return compiler() if is_compiled else None


def way_remarks(role: Role, settings: ModelSettings, processes: Processes, compile: Compile | None) -> list[str]:
    """Let a placed role learn in the fastest exact ways; return notes for the user on those that it cannot use."""
    if processes.device.type != "cuda":
        return []
    if processes.mesh is not None:
        return ["layers are not compiled and sequences are padded, because the weights are sharded"]
    return list(use(role, Ways(packs(settings), compile)))


def packs(settings: ModelSettings) -> bool:
    """Return whether sequences are packed on a GPU: PyTorch's kernels for them compute in 16 bits."""
    return settings.dtype == "bfloat16"


def compiles(settings: ModelSettings) -> bool:
    """Return whether layers are compiled on a GPU."""
    return settings.compile == "auto" and settings.quantization is None
