"""The rollouts that a finding is about: all of them as a selection, and one before it began and one since."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.reading import Reading
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array
from cavesson.findings.finding import Evidence, Example, Selection

LAST = 3
"""Steps from which a typical rollout is taken: the last ones with rollouts."""
LONGEST = 500
"""Characters of a response in an example."""


def selection(data: RunData, reading: Reading) -> Selection | None:
    """Return the rollouts that a finding is about: those that show it, else all since it began; None without any."""
    rows = data.rows if reading.affected is None else reading.affected.rows
    since = rows.step[rows.step >= _since(reading)]
    if not len(since):
        return None
    said = reading.affected
    return Selection((int(since[0]), int(since[-1])), said.filter if said else "", said.search if said else "")


def examples(data: RunData, reading: Reading) -> tuple[Example | None, Example | None]:
    """Return a typical rollout of the last steps before a finding began, and one that shows the finding.

    The first one does not show it, unless all do. The second one is a typical one among the last rollouts that show it,
    else the first place that the rule names, else a typical one of the last steps. None where there is no such rollout,
    or its response is not on record.
    """
    if not data.has("rows.response"):
        return None, None
    said = reading.affected
    rows, shows = (data.rows, np.ones(len(data.rows), bool)) if said is None else (said.rows, said.which)
    is_late = rows.step >= _since(reading)
    before = _typical(rows, ~is_late & ~shows) or _typical(rows, ~is_late)
    named = next((place for place in reading.evidence if place.step >= _since(reading)), None)
    after = _typical(rows, is_late & shows) if named is None or said is not None else named
    return _example(data, before), _example(data, after)


def _since(reading: Reading) -> float:
    return -np.inf if reading.since is None else reading.since


def _typical(rows: Rows, there: Array) -> Evidence | None:
    """Return the rollout with the median reward of the last steps in which there are some, [n] bool."""
    steps = np.unique(rows.step[there])[-LAST:]
    if not len(steps):
        return None
    return rows.evidence([rows.typical(np.flatnonzero(there & (rows.step >= steps[0])))])[0]


def _example(data: RunData, place: Evidence | None) -> Example | None:
    if place is None or place.sample is None:
        return None
    row = data.run.rollout(place.step, place.sample).row
    text, reward = row["response"], row["reward"]
    if text is None:
        return None
    return Example(
        place.step, place.sample, reward if reward is not None and np.isfinite(reward) else None, text[:LONGEST]
    )
