"""Memory use of this process."""

import mmap
from pathlib import Path


def resident() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0
