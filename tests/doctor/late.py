"""Runs in which something begins late: many healthy steps before a run of 24."""

from pathlib import Path
from shutil import copytree

from doctor_helpers import healthy
from sick import Change

import cavesson
from cavesson.doctor.data import RunData
from cavesson.record import write_run

BEFORE = 176
"""Healthy steps at the beginning."""


def begun(folder: Path, algorithm: str) -> Path:
    """Returns the folder of a healthy run of ``BEFORE`` steps, which is written if it is not there."""
    place = folder / algorithm
    return place if place.exists() else healthy(algorithm, steps=BEFORE).write(place)


def late(change: Change, begun: Path, folder: Path) -> RunData:
    """Returns a copy of a healthy run that goes on, at step ``BEFORE``, as a run of 24 steps with a change."""
    made = healthy(begun.name)
    change(made)
    made.rows["policy_version"] = made.rows["policy_version"] + BEFORE
    copytree(begun, folder)
    write_run(folder, made.info)
    return RunData(cavesson.open(made.record(folder, BEFORE)))
