"""Diagnoses a run in a separate process: ``python -m cavesson.doctor.look RUN FILE VERSION PARENT``."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import cavesson.record
from cavesson.doctor.data import RunData
from cavesson.doctor.diagnosis import diagnose
from cavesson.doctor.findings import findings_in
from cavesson.doctor.plugins import all_rules
from cavesson.doctor.report.summary import open_failures, summary
from cavesson.doctor.words import LANGUAGES, language
from cavesson.errors import UserError
from cavesson.findings.stored import Findings, write_findings
from cavesson.process_limits import small_process, yield_cpu
from cavesson.record.read.index_folder import fingerprint
from cavesson.record.run_folder import attempts

PAUSE = 0.3
"""Seconds between two checks whether the parent process still runs."""


def look(path: str, file: Path, version: str) -> None:
    """Diagnose a run and write the findings to ``file``.

    Args:
        path: Path of the run.
        file: Path of the findings. If its folder no longer exists, the run was removed, and nothing is written.
        version: A value that changes whenever the record changes.
    """
    if not file.parent.is_dir():
        return
    began = time.monotonic()
    data = RunData(cavesson.record.open(path))
    begun = attempts(data.run.storage)
    try:
        diagnosis = diagnose(data, all_rules())
    except UserError:
        if file.parent.is_dir() and attempts(data.run.storage) == begun:
            raise
        # The run was removed, or resumed, which superseded some rollouts: the next look sees what it has now.
        return
    seen = Findings(
        run=fingerprint(data.run),
        version=version,
        seconds=time.monotonic() - began,
        summary={name: summary(diagnosis, language(name)) for name in LANGUAGES},
        not_excluded={name: tuple(open_failures(diagnosis, language(name))) for name in LANGUAGES},
        last_step=data.last_step or 0,
        findings={
            name: tuple(replace(one, seen=one.shown) for one in findings_in(diagnosis, language(name)) if one.root)
            for name in LANGUAGES
        },
    )
    if file.parent.is_dir():
        write_findings(file, seen)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PAUSE)
    os._exit(0)  # the parent process, which would read the result, has ended


def main() -> None:
    """Diagnose the run at low priority; exit as soon as the parent process ends."""
    path, file, version, parent = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    yield_cpu(19)
    small_process()
    look(path, Path(file), version)


if __name__ == "__main__":
    main()
