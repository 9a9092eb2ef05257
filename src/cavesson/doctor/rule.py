"""The definition of a rule: a function of the data of a run, and the meaning of its findings."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from cavesson.doctor.finding import Reading, Severity

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData

KINDS = ("info", "steps", "rows", "tokens")
"""What a rule may need."""
Statistic = Callable[["RunData"], Reading | None]
"""Returns None where the run gives it nothing to measure."""


@dataclass(frozen=True)
class Texts:
    """The texts of a rule in one language. ``{name}`` is replaced by a word of the reading."""

    title: str
    cause: str
    healthy: str
    """The healthy range of the number seen, with its unit."""
    fix: str


@dataclass(frozen=True)
class Rule:
    """One way in which a run can go wrong."""

    name: str
    row: int
    """Its number in docs/diagnosis."""
    statistic: Statistic
    needs: tuple[str, ...]
    """What must have been measured: ``rows.NAME``, ``tokens.NAME``, ``steps.METRIC`` or ``info.KEY``; of alternatives
    joined by ``|`` one is enough."""
    texts: Texts
    source: str
    explains: tuple[str, ...] = ()
    """Rules whose findings are consequences of this one."""
    severity: Severity = "warning"
    least_steps: int = 1
    """Fewest steps to say anything."""
    algorithms: tuple[str, ...] = ()
    """Where it applies; empty: everywhere, also to records of trainers that say nothing of their algorithm."""


def rule(
    *,
    row: int,
    needs: Iterable[str],
    title: str,
    cause: str,
    healthy: str,
    fix: str,
    source: str,
    explains: Iterable[str] = (),
    severity: Severity = "warning",
    least_steps: int = 1,
    algorithms: Iterable[str] = (),
) -> Callable[[Statistic], Rule]:
    """Create a rule from a function, named after it with hyphens; for the arguments, see ``Rule`` and ``Texts``.

    Raises:
        ValueError: The severity or the kind of a need is unknown.
    """
    needs = tuple(needs)
    unknown = [one for need in needs for one in need.split("|") if one.partition(".")[0] not in KINDS]
    if unknown:
        raise ValueError(f"needs: {unknown[0]!r} is none of rows.NAME, tokens.NAME, steps.METRIC and info.PATH")
    if severity not in get_args(Severity):
        raise ValueError(f"severity: {severity!r} is none of {', '.join(get_args(Severity))}")

    def made(statistic: Statistic) -> Rule:
        return Rule(
            name=statistic.__name__.replace("_", "-"),
            row=row,
            statistic=statistic,
            needs=needs,
            texts=Texts(title, cause, healthy, fix),
            source=source,
            explains=tuple(explains),
            severity=severity,
            least_steps=least_steps,
            algorithms=tuple(algorithms),
        )

    return made
