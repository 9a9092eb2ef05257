"""Run a command until it ends or until the process that asked for it has: ``python supervisor.py PARENT COMMAND …``.

A kill of that process cannot be caught, and a command that is killed can leave its own processes behind. The
supervisor leads its own process group, which it kills as a whole. It imports nothing but the standard library.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

PATIENCE = 3.0
"""Seconds in which a command must end; a launcher gives its processes little more."""
_PAUSE = 0.1


def main() -> None:
    """End with the exit code or the signal of the command, or kill the group when the parent or SIGTERM asks for it."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    child = subprocess.Popen(command)
    while child.poll() is None and not asked and os.getppid() == parent:
        time.sleep(_PAUSE)
    if child.returncode is None or os.getppid() != parent:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(PATIENCE)
        os.killpg(0, signal.SIGKILL)
    if child.returncode < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.raise_signal(-child.returncode)
    sys.exit(child.returncode)


if __name__ == "__main__":
    main()
