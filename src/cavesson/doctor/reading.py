"""The result of applying a rule to a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array, Series
from cavesson.findings.finding import Evidence, Severity
from cavesson.findings.words import Phrase

Words = Mapping[str, str | float]
"""What the placeholders of a rule's texts stand for."""


@dataclass(frozen=True)
class Curve:
    """The values that a rule examines, by step or along another axis."""

    points: Series
    low: float | None = None
    high: float | None = None
    """The healthy range is between these; None: not limited on this side."""
    name: Phrase | None = None
    """What the values are; None: the number that the rule measures."""
    along: Phrase | None = None
    """What the x axis is; None: the steps."""


@dataclass(frozen=True)
class Affected:
    """Which rollouts show a problem, where a condition on each of them says it: a filter or a search of the board."""

    rows: Rows
    which: Array
    """[n] bool, of these rows"""
    filter: str = ""
    search: str = ""
    """A regular expression (RE2)."""


@dataclass(frozen=True)
class Reading:
    """The measurement of a rule, healthy or not; ``since`` and ``evidence`` matter only if it is not healthy."""

    seen: float
    """The measured number; the rule's ``healthy`` text has its meaning and unit."""
    unhealthy: bool
    since: int | None = None
    """First step of the problem."""
    evidence: tuple[Evidence, ...] = ()
    words: Words = field(default_factory=dict)
    curve: Curve | None = None
    """None if the number is not one per step."""
    course: Series | None = None
    """Values by step that show when the problem began, if those of the curve do not; a higher value is worse, and the
    problem began when they doubled."""
    between: tuple[int, int] | None = None
    """Two steps between which the problem began, with a probability of 90 %; None: not estimated."""
    noticed: int | None = None
    """What the rule itself gives as ``since``, before it is estimated: the step from which a limit is exceeded, say."""
    window: tuple[int, int] | None = None
    """The first and the last step that were judged; None: the whole run."""
    severity: Severity | None = None
    """How grave the problem is; None: as the rule says."""
    affected: Affected | None = None
    """The rollouts that show the problem; None: no condition on single rollouts tells them from the others."""
    undecided: Phrase | None = None
    """Why a problem that was not found may be there all the same, and what would show it."""


@dataclass(frozen=True)
class Skipped:
    """A rule that could not be applied."""

    rule: str
    number: int
    reason: Phrase
    words: Words = field(default_factory=dict)
    """What the placeholders of the reason stand for."""
    lacking: tuple[str, ...] = ()
    """The needs of the rule that are neither recorded nor derived."""
    undecided: bool = False
    """Whether the columns are there, but the run does not show whether there is a problem, or is too short for that."""
