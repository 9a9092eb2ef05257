"""The memory of the device: a GPU, or the machine."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")


def total_memory(device: torch.device) -> int:
    """Return the total memory in bytes: of the GPU, or of the machine within its container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    physical, limit = int(psutil.virtual_memory().total), _container_limit()
    return physical if limit is None else min(physical, limit)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still allocate, on the GPU or within the container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    available, limit = int(psutil.virtual_memory().available), _container_limit()
    if limit is None:
        return available
    used = int((_CGROUP / "memory.current").read_text()) - _reclaimable()
    return min(available, limit - used)


def _container_limit() -> int | None:
    """Return the container's memory limit in bytes, or None if there is no limit."""
    file = _CGROUP / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def _reclaimable() -> int:
    """Return the bytes of cached files in the container, which the kernel frees when memory is needed."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
