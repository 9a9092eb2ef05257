"""The processors that this process may use."""

import os
import sys
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_processors() -> int:
    """Return this process's share of the processors, at least 1.

    Affinity and the quota of a container may allow fewer than the machine has, and the processes of a run on the same
    machine share them.
    """
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota, _, period = _QUOTA.read_text().strip().partition(" ") if _QUOTA.exists() else ("max", "", "")
    limit = float(allowed) if quota == "max" else int(quota) / int(period)
    return max(1, int(min(allowed, limit) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
