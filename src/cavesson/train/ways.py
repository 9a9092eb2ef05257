"""The choice of the ways in which a run computes its passes."""

from cavesson.models.compiled import compiler
from cavesson.models.passes import Role, Ways, use
from cavesson.models.settings import ModelSettings
from cavesson.processes import Processes


def way_remarks(role: Role, settings: ModelSettings, processes: Processes) -> list[str]:
    """Let a role that is in its place learn in the fastest exact ways; return notes for the user on what they are not.

    A CPU computes plainly, so that a run has the same bits on all machines with its products.
    """
    if processes.device.type != "cuda":
        return []
    if processes.mesh is not None:
        return ["layers are not compiled and sequences are padded, because the weights are sharded"]
    return list(use(role, Ways(packs(settings), compiler() if compiles(settings) else None)))


def packs(settings: ModelSettings) -> bool:
    """Return whether sequences are packed on a GPU: PyTorch's kernels for them compute in 16 bits."""
    return settings.dtype == "bfloat16"


def compiles(settings: ModelSettings) -> bool:
    """Return whether layers are compiled on a GPU."""
    return settings.compile == "auto" and settings.quantization is None
