"""The names of figures of the machine in other tools."""

import re
from typing import NamedTuple

GIB = 2**30
_MIB, _MB = 2**20 / GIB, 1e6 / GIB


class _Figure(NamedTuple):
    theirs: str
    """A pattern; what it captures is the GPU, or the process or node and its GPU."""
    ours: str
    unit: float = 1.0
    """In ours."""


_WANDB = r"system\.gpu\.(\d+)\."
_TRACKIO = r"(?:rank(\d+)/)?gpu/(\d+)/"
_MLFLOW = r"system/gpu_(\d+)_"
_NEMO_RL = r"ray/node\.(\d+)\.gpu\.(\d+)\."
_FIGURES = (
    _Figure(_WANDB + "gpu", "gpu/{}/utilization"),
    _Figure(_WANDB + "memoryAllocatedBytes", "gpu/{}/memory", 1 / GIB),
    _Figure(_WANDB + "temp", "gpu/{}/temperature"),
    _Figure(_WANDB + "powerWatts", "gpu/{}/power"),
    _Figure(r"system\.cpu", "process/cpu"),
    _Figure(r"system\.proc\.memory\.rssMB", "process/memory", _MIB),
    _Figure(_TRACKIO + "utilization", "gpu/{}/utilization"),
    _Figure(_TRACKIO + "allocated_memory", "gpu/{}/memory"),
    _Figure(_TRACKIO + "temp", "gpu/{}/temperature"),
    _Figure(_TRACKIO + "power", "gpu/{}/power"),
    _Figure(_MLFLOW + "utilization_percentage", "gpu/{}/utilization"),
    _Figure(_MLFLOW + "memory_usage_megabytes", "gpu/{}/memory", _MB),
    _Figure(_MLFLOW + "power_usage_watts", "gpu/{}/power"),
    _Figure("system/cpu_utilization_percentage", "cpu"),
    _Figure("system/system_memory_usage_megabytes", "memory", _MB),
    _Figure(_NEMO_RL + "util", "gpu/{}/utilization"),
    _Figure(_NEMO_RL + "mem_gb", "gpu/{}/memory"),
    _Figure("(?:actor/)?perf/cpu_memory_used_gb", "memory"),
)
"""Those of Weights & Biases, Trackio, MLflow, NeMo RL, and verl."""


def of_machine(name: str, value: float) -> tuple[str, float] | None:
    """Return a figure under Cavesson's name and in its unit, or None if it is another metric."""
    for figure in _FIGURES:
        if found := re.fullmatch(figure.theirs, name):
            gpu = ".".join(filter(None, found.groups()))
            return "machine/" + figure.ours.format(gpu), value * figure.unit
    return None
