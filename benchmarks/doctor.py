"""What the doctor costs in seconds and memory: the command, the page, and the look beside a run.

    python benchmarks/doctor.py                                  1 million rollouts; the first time it writes the record
    python benchmarks/doctor.py --run runs/bench-doctor-20k --rollouts 20000

Each is a separate process, run once before it is measured, so that the files are in memory.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from generate_record import add_arguments, ensure, plan_of

SECONDS, MEBIBYTES = 10.0, 1000.0
"""The bounds for a million rollouts."""


def measured(module: str, *arguments: str) -> tuple[float, float, float]:
    """Return wall seconds, processor seconds and peak MiB of ``python -m module arguments``."""
    command = [sys.executable, "-m", module, *arguments]
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def main() -> None:
    """Print a line for each beside the bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("runs/bench-doctor-1m"), help="folder of the record")
    parser.add_argument("--times", type=int, default=1, help="number of measurements")
    add_arguments(parser)
    parser.set_defaults(rollouts=1_000_000)
    given = parser.parse_args()
    ensure(given.run, plan_of(given))
    run = str(given.run)
    with TemporaryDirectory() as folder:
        ways = {
            "cavesson doctor": ("cavesson", "doctor", run),
            "cavesson doctor --html": ("cavesson", "doctor", run, "--html", f"{folder}/page.html"),
            "look": ("cavesson.doctor.look", run, f"{folder}/findings.json", "", str(os.getpid())),
        }
        for name, (module, *arguments) in ways.items():
            measured(module, *arguments)
            found = [measured(module, *arguments) for _ in range(given.times)]
            walls, processors, peaks = zip(*found, strict=True)
            wall, memory = median(walls), max(peaks)
            verdict = "ok" if wall < SECONDS and memory < MEBIBYTES else "OVER"
            between = f"({min(walls):.1f} to {max(walls):.1f})"
            cost = f"{wall:6.1f} s {between} of {SECONDS:g}{median(processors):8.1f} s CPU"
            cost += f"{memory:8.0f} MiB of {MEBIBYTES:g}"
            print(f"{name:24}{cost}  {verdict}")


if __name__ == "__main__":
    main()
