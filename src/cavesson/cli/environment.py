"""What the command changes in its own process before anything large is imported."""

import gc
import os
import sys
from io import TextIOWrapper

SPINS = 1000
"""Turns of a loop, some ten microseconds, in which a thread of PyTorch waits for another one before it sleeps."""
OBJECTS = 10_000
"""New objects before Python looks for unreachable cycles among them; by default 700."""


def prepare() -> None:
    """Set what makes the process fast and its output readable; variables that the user has set stay."""
    # Files and pipes get the encoding of the system, such as cp1252 on Windows, which lacks most characters. stderr
    # writes an escape for those by itself.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars of libraries make log files unreadable
    # By default a thread occupies its core for milliseconds while it waits for one that another program has displaced:
    # beside a busy program, small models then train several times slower. libgomp reads this when PyTorch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))
    # Imports create hundreds of thousands of objects, none of them unreachable: looking for cycles would take a sixth
    # of the time of `import cavesson.train.run`.
    gc.set_threshold(OBJECTS)
