"""The result of applying a rule to a run."""

from dataclasses import dataclass, field
from typing import Literal

from cavesson.doctor.series import Series

Severity = Literal["error", "warning", "note"]
"""error: what is learned or logged is wrong. warning: the run is failing. note: worth a look."""


class Phrase(str):
    """A part of a text that is translated, as opposed to text from the user's data."""


class Percent(float):
    """A number relative to another one, such as its start, shown in per cent; it can be negative or above 100 %."""


class Share(Percent):
    """A part of a whole, from 0 % to 100 %."""


Words = dict[str, str | float]
"""What the placeholders of a rule's texts stand for."""


@dataclass(frozen=True)
class Curve:
    """The values that a rule examines, by step or along another axis."""

    points: Series
    low: float | None = None
    high: float | None = None
    """Between these it is healthy; None: there is no such limit."""
    name: Phrase | None = None
    """What it is; None: the number that the rule tells."""
    along: Phrase | None = None
    """What the points lie along; None: the steps."""


@dataclass(frozen=True)
class Evidence:
    """A place in the record that shows the finding."""

    step: int
    sample: int | None = None
    """None: the whole step."""
    start: int | None = None
    """First token of the response that matters; None: the whole response."""
    stop: int | None = None
    """The token behind the last one."""


@dataclass(frozen=True)
class Reading:
    """The measurement of a rule, healthy or not; ``since`` and ``evidence`` matter only if it is not healthy."""

    seen: float
    """The number; its meaning and unit are the rule's ``healthy`` text."""
    sick: bool
    since: int | None = None
    """First step of the trouble."""
    evidence: tuple[Evidence, ...] = ()
    words: Words = field(default_factory=dict)
    curve: Curve | None = None
    """None where it is no number of a step."""


@dataclass(frozen=True)
class Skipped:
    """A rule that could not be applied."""

    rule: str
    row: int
    reason: Phrase
    words: Words = field(default_factory=dict)
    """What the placeholders of the reason stand for."""
