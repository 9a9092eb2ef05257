"""The memory of this process and of what it computes on."""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def resident() -> int:
    """Bytes of this process that are in memory now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


def total_memory(device: "torch.device") -> int:
    """Bytes that there are: of the GPU, or of the machine within its container's limit."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    import psutil  # comes with training only, and what reads a record asks for `resident`

    physical, limit = int(psutil.virtual_memory().total), _container_limit()
    return physical if limit is None else min(physical, limit)


def free_memory(device: "torch.device") -> int:
    """Bytes that this process can still allocate: of the GPU, or of the machine within its container's limit."""
    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    import psutil

    available, limit = int(psutil.virtual_memory().available), _container_limit()
    if limit is None:
        return available
    used = int((_CGROUP / "memory.current").read_text()) - _reclaimable()
    return min(available, limit - used)


def _container_limit() -> int | None:
    """Bytes that the container may use; None where nothing limits it."""
    file = _CGROUP / "memory.max"
    limit = file.read_text().strip() if file.exists() else "max"
    return None if limit == "max" else int(limit)


def _reclaimable() -> int:
    """Bytes of files in the container's memory, which the kernel drops where memory is needed."""
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
