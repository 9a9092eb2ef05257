"""The definition of a rule: a function of the data of a run, and the meaning of its findings."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal, get_args

from cavesson.doctor.names import KINDS
from cavesson.doctor.reading import Reading
from cavesson.findings.finding import Severity
from cavesson.findings.words import Phrase

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData

NEED_FORMS = ("rows.NAME", "tokens.NAME", "turns.NAME", "steps.METRIC", "info.PATH")
"""How a need names what it needs."""
APPLIES = {
    "grouped": Phrase("applies to algorithms that compare the responses to a prompt with each other"),
    "clipped": Phrase("applies to algorithms that clip the probability ratio"),
    "critic": Phrase("applies to algorithms with a critic"),
    "kl_place": Phrase("applies to algorithms with a KL penalty"),
    "length_normalised": Phrase("applies to losses that are divided by the length of each response"),
}
"""Trait that a rule can ask for → why the rule is skipped where an algorithm does not have it."""
Statistic = Callable[["RunData"], Reading | None]
"""Measures a run; None if the run has nothing to measure. Its keyword-only parameters are the limits of the rule."""
Settings = Mapping[str, Any]
"""By their dotted names: values, or functions that return one from the present value, the run and the reading."""


@dataclass(frozen=True)
class Texts:
    """The texts of a rule in one language. ``{name}`` is replaced by a limit of the rule or a word of the reading."""

    title: str
    cause: str
    healthy: str
    """What the number seen is, with its unit, and its healthy range; only limits are filled in."""
    fix: str


@dataclass(frozen=True)
class Disproof:
    """A measured fact that excludes a fault which a rule infers from something else."""

    columns: tuple[str, ...]
    """Where it is recorded, as in the needs of a rule."""
    shows: str
    """What shows that the fault is absent."""
    excludes: "Callable[[RunData], bool] | None" = None
    """Whether it is absent, so that nothing is found; None: the statistic of the rule reads these columns first."""


@dataclass(frozen=True)
class Rule:
    """One way in which a run can go wrong."""

    name: str
    number: int
    """Its number in docs/diagnosis."""
    statistic: Statistic
    needs: tuple[str, ...]
    """What must have been measured: ``rows.NAME``, ``tokens.NAME``, ``turns.NAME``, ``steps.METRIC`` or ``info.KEY``;
    of alternatives joined by ``|`` one is enough."""
    recorded: tuple[str, ...]
    """Those of the needs that must be recorded: a derivation would presuppose that this fault is absent."""
    texts: Texts
    source: str
    limits: Mapping[str, float]
    """The numbers that separate healthy from unhealthy, by the names that function and texts use."""
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""
    severity: Severity = "warning"
    min_steps: int = 1
    """Steps that a run must have."""
    traits: tuple[str, ...] = ()
    """What an algorithm must have, by fields of ``cavesson.traits.Traits``; where it is not known, the rule applies."""
    windows: bool = False
    """Whether it is applied to the latest parts of a run, too, each as if the run had begun there."""
    training_only: bool = False
    """Whether it judges what training samples: held-out responses are not learned from, and often greedy."""
    absent: "Callable[[RunData], Phrase | None] | None" = None
    """Why a run that the rule cannot judge cannot have the fault, such as a penalty whose coefficient is 0; it returns
    None if the run can have it."""
    alone: Severity | Literal["healthy"] | None = None
    """How severe it is where it explains no finding but notes; "healthy": it is not a finding if it explains nothing.
    None: as otherwise."""
    disproof: Disproof | None = None
    """What would disprove a finding, if it is recorded; None: the rule compares recorded numbers and infers nothing."""
    settings: Settings = field(default_factory=dict)
    """What ``fix`` says as settings, if they can end the problem; those that a run lacks do not count."""


def rule(
    *,
    number: int,
    needs: Iterable[str],
    recorded: Iterable[str] = (),
    title: str,
    cause: str,
    healthy: str,
    fix: str,
    source: str,
    explains: Iterable[str] = (),
    severity: Severity = "warning",
    min_steps: int = 1,
    traits: Iterable[str] = (),
    windows: bool = False,
    training_only: bool = False,
    absent: "Callable[[RunData], Phrase | None] | None" = None,
    alone: Severity | Literal["healthy"] | None = None,
    disproof: Disproof | None = None,
    settings: Settings | None = None,
) -> Callable[[Statistic], Rule]:
    """Create a rule from a function, named after it with hyphens; for the arguments, see ``Rule`` and ``Texts``.

    The function states each limit of the rule once, as the default of a keyword-only parameter. All texts, their
    translations and the documentation are filled from these.

    Raises:
        ValueError: The severity, a trait or the kind of a need is unknown, ``recorded`` is not among the needs, or
            ``healthy`` names a limit that the function lacks.
    """
    needs, recorded, traits = tuple(needs), tuple(recorded), tuple(traits)
    unknown = [one for need in needs for one in need.split("|") if one.partition(".")[0] not in KINDS]
    if unknown:
        raise ValueError(f"needs: {unknown[0]!r} is not one of {', '.join(NEED_FORMS)}")
    if others := set(recorded) - set(needs):
        raise ValueError(f"recorded: {min(others)!r} is not among the needs")
    if unknown := sorted(set(traits) - APPLIES.keys()):
        raise ValueError(f"traits: {unknown[0]!r} is not one of {', '.join(APPLIES)}")
    if severity not in get_args(Severity):
        raise ValueError(f"severity: {severity!r} is not one of {', '.join(get_args(Severity))}")

    def made(statistic: Statistic) -> Rule:
        parameters = inspect.signature(statistic).parameters.values()
        limits = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        for _, name, _, _ in Formatter().parse(healthy):
            if name is not None and name not in limits:
                raise ValueError(f"healthy: {{{name}}} is not a keyword-only parameter of {statistic.__name__}")
        return Rule(
            name=statistic.__name__.replace("_", "-"),
            number=number,
            statistic=statistic,
            needs=needs,
            recorded=recorded,
            texts=Texts(title, cause, healthy, fix),
            source=source,
            limits=limits,
            explains=tuple(explains),
            severity=severity,
            min_steps=min_steps,
            traits=traits,
            windows=windows,
            training_only=training_only,
            absent=absent,
            alone=alone,
            disproof=disproof,
            settings=settings or {},
        )

    return made
