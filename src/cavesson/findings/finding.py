"""The results of a check, before a run, at its start or afterwards."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cavesson.findings.words import number

Severity = Literal["error", "warning", "note"]
"""error: what is trained or logged is wrong. warning: the run is failing. note: worth checking."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Evidence:
    """A place in the record that shows a finding."""

    step: int
    sample: int | None = None
    """None: the whole step."""
    start: int | None = None
    """First token of the response that matters; None: the whole response."""
    stop: int | None = None
    """The token after the last one."""

    @property
    def view(self) -> str:
        """The address of the place on the board, relative to the address of the board."""
        if self.sample is None:
            return f"step?step={self.step}"
        token = "" if self.start is None else f"&token={self.start}"
        return f"tokens?step={self.step}&sample={self.sample}{token}"


@dataclass(frozen=True)
class Selection:
    """Rollouts, as the board selects them."""

    steps: tuple[int, int]
    """The first and the last step."""
    filter: str = ""
    search: str = ""
    """A regular expression (RE2)."""


@dataclass(frozen=True)
class Example:
    """A rollout that shows what a finding is about."""

    step: int
    sample: int
    reward: float | None
    text: str
    """The beginning of the response."""


@dataclass(frozen=True)
class TrainerSettingNames:
    """What another trainer calls settings of Cavesson."""

    trainer: str
    settings: Mapping[str, str]
    """Cavesson's setting → the trainer's."""


@dataclass(frozen=True)
class Finding:
    """Something that is or will be wrong with a run, in one language."""

    rule: str
    """Name of the rule or check that found it."""
    severity: Severity
    title: str
    cause: str
    fix: str
    seen: float | str | None = None
    """The number, or what stands there instead of one."""
    healthy: str = ""
    """What the number means and where it is healthy."""
    source: str = ""
    number: int | None = None
    """Of the rule in docs/diagnosis."""
    root: bool = True
    """False: another finding explains it."""
    since_step: int | None = None
    since_between: tuple[int, int] | None = None
    """Two steps between which it began, with a probability of 90 %; None: not estimated."""
    window: tuple[int, int] | None = None
    """The first and the last step that were judged; None: the whole run."""
    evidence: tuple[Evidence, ...] = ()
    explains: Mapping[str, str] = field(default_factory=dict)
    """Rules whose findings are its consequences → their titles."""
    derived: Mapping[str, str] = field(default_factory=dict)
    """What the rule read that the record lacks → what it was computed from."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings to change, by their dotted names; empty if no setting of the run ends the problem."""
    trainer_setting_names: TrainerSettingNames | None = None
    """The settings that the fix names, in the run's trainer; None if it is Cavesson, not known, or has none of them."""
    happened: str = ""
    """What changed, in words and numbers; empty if nothing was measured before it began."""
    affected: Selection | None = None
    """The rollouts that it is about; None if there are none on record."""
    before: Example | None = None
    """A typical rollout of the last steps before it began; None if there is none with a text."""
    after: Example | None = None
    """A rollout that shows it; None if there is none with a text."""

    @property
    def shown(self) -> str:
        """The number seen, as people read it."""
        return shown(self.seen)

    def unless(self, is_healthy: bool) -> "Finding | Fine":
        """Return the finding, or, if the number is healthy, the same check without one."""
        assert self.seen is not None
        return Fine(self.rule, self.seen, self.healthy) if is_healthy else self


@dataclass(frozen=True)
class Fine:
    """A check without a finding."""

    rule: str
    seen: float | str
    healthy: str


@dataclass(frozen=True)
class SkippedCheck:
    """A check that could not be done, and why."""

    rule: str
    reason: str


Result = Finding | Fine | SkippedCheck
Results = Iterator[Result]


def shown(seen: float | str | None) -> str:
    """Return the number that a check has seen as people read it; empty if there is none."""
    return seen if isinstance(seen, str) else "" if seen is None else number(seen)


def worst(severities: Iterable[Severity]) -> Severity | None:
    """Return the highest severity; None if there are none."""
    return min(severities, key=SEVERITIES.index, default=None)
