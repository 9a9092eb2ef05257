"""Memory use of this process."""

import mmap
from pathlib import Path


def resident() -> int:
    """Return the resident memory of this process in bytes, or 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * mmap.PAGESIZE
    except FileNotFoundError:
        return 0


def peak_resident() -> int:
    """Return the most memory in bytes that this process has ever had, or 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
