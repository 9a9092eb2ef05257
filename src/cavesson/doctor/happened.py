"""What changed with a finding, in words and numbers: the levels before it began and since."""

import re
from typing import NamedTuple

from cavesson.doctor.reading import Reading
from cavesson.doctor.rule import Rule
from cavesson.doctor.words import Language
from cavesson.findings.words import Share, number

FORMULA = re.compile("[|Σπδ]")
"""What makes the name of a number one that a sentence cannot begin with."""


class Levels(NamedTuple):
    """The means of what a rule examines over the steps before and since the problem."""

    before: float
    since: float


def levels(reading: Reading) -> Levels | None:
    """Return the levels before and since a problem; None where nothing was measured before, or not by step."""
    curve = reading.curve
    if curve is None or curve.along is not None or reading.since is None:
        return None
    points = curve.points
    before, after = points.value[points.step < reading.since], points.value[points.step >= reading.since]
    return Levels(float(before.mean()), float(after.mean())) if len(before) and len(after) else None


def happened(rule: Rule, reading: Reading, language: Language) -> str:
    """Return a sentence with what was measured before a problem and since; empty if there is nothing to compare."""
    found = levels(reading)
    if found is None:
        return ""
    assert reading.curve is not None
    called = reading.curve.name
    name = re.split("[:：]", language.healthy(rule))[0] if called is None else language.phrase(called)
    # The curves with a name of their own that are shares say so.
    kind = type(reading.seen) if called is None else Share if called.startswith("share ") else float
    before, after = (number(kind(value)) for value in found)
    if before == after or FORMULA.search(name):
        return ""
    sentence = language.phrase("{name}: {after} on average from step {since} on, {before} before.")
    said = sentence.format(name=name, after=after, since=reading.since, before=before)
    return said[0].upper() + said[1:]
