"""What a rule says of a run."""

from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""error: what is learned or logged is wrong. warning: the run is failing. note: worth a look."""


class Phrase(str):
    """A part of a text that is translated, unlike a word of the user's data."""


Words = dict[str, str | float]
"""What the placeholders of a rule's texts stand for."""


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
    """What a rule measured, whether or not that is healthy."""

    seen: float
    """The number; its meaning and unit are the rule's ``healthy`` text."""
    sick: bool
    since: int | None = None
    """First step of the trouble."""
    evidence: tuple[Evidence, ...] = ()
    words: Words = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A rule that could not be applied."""

    rule: str
    row: int
    reason: str
