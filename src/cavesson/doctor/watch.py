"""Looks at a growing run now and then, each time in a process of its own, so that nothing waits for the doctor."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from cavesson.doctor.findings_file import read_findings

SHARE = 0.01
"""Of the time that looking may take."""


class Watch:
    """Starts a look when the run has grown and the last look is long enough ago.

    Args:
        run: Path of the run.
        file: Where the findings are kept; others may be watching the same run, and keep theirs there too.
        share: Of the time that looking may take: after a look of a second it rests for 1 / share seconds.
        after: Seconds before the first look.
    """

    def __init__(self, run: str, file: Path, share: float = SHARE, after: float = 0.0) -> None:
        self.run = run
        self.file = file
        self.share = share
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._next = time.time() + after
        self._version = ""
        known = read_findings(file)
        if known is not None:
            self._version = known.version
            self._next = max(self._next, file.stat().st_mtime + known.seconds / share)

    def tend(self, state: str) -> bool:
        """Starts a look if it is time for one; to be called now and then.

        Args:
            state: What differs whenever the record does.

        Returns:
            Whether a look has ended since the last call.
        """
        ended = self._ended()
        version = hashlib.sha256(state.encode()).hexdigest()[:16]
        if self._process is None and version != self._version and time.time() >= self._next:
            self._start(version)
        return ended

    def look(self, state: str) -> bool:
        """Looks at once, and waits until that is done; returns whether it worked."""
        if self._process is not None:
            self._process.wait()
        self._start(hashlib.sha256(state.encode()).hexdigest()[:16])
        assert self._process is not None
        worked = self._process.wait() == 0
        self._ended()
        return worked

    def _ended(self) -> bool:
        if self._process is None or self._process.poll() is None:
            return False
        now = time.time()
        self._next = now + (now - self._began) / self.share
        self._process = None
        return True

    def _start(self, version: str) -> None:
        command = [sys.executable, "-m", "cavesson.doctor.look", self.run, str(self.file), version]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        # In a session of its own, because Ctrl-C is for who is watching.
        self._process = subprocess.Popen([*command, str(os.getpid())], env=environment, start_new_session=True)
        self._began = time.time()
        self._version = version  # whether or not it works: the same record would fail again
