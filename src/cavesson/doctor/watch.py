"""Diagnoses a growing run from time to time, each time in a separate process, so that nothing waits for the doctor."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

from cavesson.findings.stored import read_findings

SHARE = 0.01
"""Maximum share of the time that diagnoses may take."""


class Watch:
    """Starts a diagnosis if the run has grown and the last diagnosis is long enough ago.

    Args:
        run: Path of the run.
        file: Path of the findings; other processes that watch the same run can use the same file.
        share: Share of the time that diagnoses may take: after a diagnosis of 1 s, the doctor pauses for 1 / share s.
        after: Seconds before the first diagnosis.
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

    @property
    def running(self) -> bool:
        """Whether a diagnosis is running."""
        return self._process is not None and self._process.poll() is None

    def poll(self, state: str, start: bool = True) -> bool:
        """Start a diagnosis if one is due; must be called from time to time.

        Args:
            state: A value that changes whenever the record changes.
            start: Whether a diagnosis may start now.

        Returns:
            Whether a diagnosis has ended since the last call.
        """
        ended = self._ended()
        version = hashlib.sha256(state.encode()).hexdigest()[:16]
        if start and self._process is None and version != self._version and time.time() >= self._next:
            self._start(version)
        return ended

    def look(self, state: str) -> bool:
        """Diagnose now and wait for the result; return whether it succeeded."""
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
        # In a separate session, so that Ctrl-C reaches only the watching process.
        self._process = subprocess.Popen([*command, str(os.getpid())], env=environment, start_new_session=True)
        self._began = time.time()
        self._version = version  # set even if the diagnosis fails, because the same record would fail again
