"""Runs in which something begins late: many healthy steps before a run of 24."""

from pathlib import Path
from shutil import copytree

import numpy as np
from doctor_helpers import LENGTH, Array, Made, healthy
from sick import Change

import cavesson
from cavesson.doctor.data import RunData
from cavesson.record import write_run

BEFORE = 176
"""Healthy steps at the beginning."""


def begun(folder: Path, algorithm: str, change: Change | None = None) -> Path:
    """Return the folder of a run of ``BEFORE`` steps, healthy or changed, which is written if it is not there."""
    place = folder / (change.__name__ if change else "healthy") / algorithm
    if not place.exists():
        made = healthy(algorithm, steps=BEFORE)
        (change or (lambda made: None))(made)
        made.write(place)
    return place


def short(made: Made) -> None:
    """Responses have up to 8 tokens, and end by themselves."""
    cut_to(made, np.full(len(made.mask), 8))


def cut(made: Made) -> None:
    """Four of five responses are cut, which costs them one point."""
    short(made)
    is_cut = np.random.default_rng(6).random(made.rows["reward"].shape) < 0.8
    made.rows["finish_reason"] = np.where(is_cut, "length", "eos").astype(object)
    made.rows["reward"] = made.rows["reward"] - is_cut


def longer(made: Made) -> None:
    """The reward is the length, and within four steps the responses have up to 20 tokens."""
    cut_to(made, 8 + 12 * np.minimum(np.arange(len(made.mask)) + 1, 4) // 4)
    made.rows["reward"] = 0.3 * made.mask.sum(-1)


def cut_to(made: Made, most: Array) -> None:
    """Give each response a random length of at most ``most`` tokens, [S]."""
    keep = np.random.default_rng(5).integers(1, most[:, None] + 1, made.rows["reward"].shape)
    made.tokens["mask"] = np.arange(LENGTH) < keep[..., None]
    made.rows["finish_reason"][:] = "eos"


def late(change: Change, begun: Path, folder: Path) -> RunData:
    """Return a copy of a healthy run that goes on, at step ``BEFORE``, as a run of 24 steps with a change."""
    made = healthy(begun.name)
    change(made)
    made.rows["policy_version"] = made.rows["policy_version"] + BEFORE
    copytree(begun, folder)
    write_run(folder, made.info)
    return RunData(cavesson.open(made.record(folder, BEFORE)))
