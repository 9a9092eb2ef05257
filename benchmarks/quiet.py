"""Measure while nothing else is busy, and say what was measured on which processor.

A measurement is a separate process, so what it used of the processor is known: the rest belongs to other programs.
"""

import os
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeVar

import psutil

BUSY = 0.1
"""Cores that other programs may use, on average over a measurement."""
ATTEMPTS = 3
NOT_USED = ("idle", "iowait", "guest", "guest_nice")
"""Of the kinds of processor time; what guests use is part of `user` and `nice`."""

T = TypeVar("T")


def quietly(measure: Callable[[], T], busy: float = BUSY, attempts: int = ATTEMPTS) -> tuple[T, float]:
    """Measure again while other programs were busy, at most `attempts` times.

    Args:
        measure: does all its work in processes that it waits for.
        busy: cores that other programs may use, on average.
        attempts: what is done at most, however busy they are.

    Returns:
        The result of the quietest attempt, and the cores that other programs used meanwhile.
    """
    tries: list[tuple[T, float]] = []
    while not tries or (len(tries) < attempts and tries[-1][1] > busy):
        begin, before = perf_counter(), _used_by_others()
        result = measure()
        tries.append((result, max(0.0, _used_by_others() - before) / (perf_counter() - begin)))
    return min(tries, key=lambda attempt: attempt[1])


def _used_by_others() -> float:
    """Return the processor seconds so far of everything but this process and those it has waited for."""
    times = psutil.cpu_times()._asdict()
    used = sum(seconds for kind, seconds in times.items() if kind not in NOT_USED)
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return float(used - sum(usage.ru_utime + usage.ru_stime for usage in own))


def note(others: float) -> str:
    """Return what to add to a result if other programs were busy in every attempt."""
    return "" if others <= BUSY else f"; other programs used {others:.1f} cores"


def machine() -> str:
    """Return the processor's name, its cores, and the load of the last minute."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else os.uname().machine
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def spread(values: Iterable[float], digits: str = ".3g") -> str:
    """Return the median with the range."""
    found = sorted(values)
    return f"{median(found):{digits}} ({found[0]:{digits}}–{found[-1]:{digits}})"
