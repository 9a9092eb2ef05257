"""Numbers from results: how often the doctor is right."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.faults.case import Case
from benchmarks.faults.results import Result


@dataclass(frozen=True)
class Score:
    """How often the planted fault was named, over some runs with one fault each."""

    runs: int
    first: float
    """Share named first"""
    third: float
    """Share named among the first three"""
    named: float
    """Share named at all (recall)"""
    precision: float
    """Share of all names, on faulty and healthy runs, that are right"""
    alarms: float
    """Names per 1,000 steps of healthy runs"""
    healthy_steps: int


def score(results: Iterable[Result]) -> Score:
    """Return the score of runs with one fault and of healthy ones."""
    results = list(results)
    sick = [one for one in results if len(one.case.faults) == 1]
    healthy = [one for one in results if not one.case.faults]
    right = sum(sum(one.right) for one in sick)
    said = sum(len(one.named) for one in (*sick, *healthy))
    steps = sum(one.steps for one in healthy)
    return Score(
        len(sick),
        _share(one.right[:1] == [True] for one in sick),
        _share(any(one.right[:3]) for one in sick),
        _share(any(one.right) for one in sick),
        right / said if said else float("nan"),
        1000 * sum(len(one.named) for one in healthy) / steps if steps else float("nan"),
        steps,
    )


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def visible(found: Iterable[Result], own: Mapping[Case, Result]) -> list[Result]:
    """Return the healthy runs, and those with a fault of which not all causes are beyond what was looked at.

    Args:
        found: What is said of imports, or by another tool.
        own: What is said of the runs themselves; what could not be applied there either is nobody's shortcoming.
    """

    def lost(one: Result) -> set[str]:
        return set(one.skipped) - set(own[one.case].skipped)

    return [one for one in found if all(set(causes) - lost(one) for causes in one.accepted)]


def both_named(results: Iterable[Result]) -> tuple[int, int]:
    """Return in how many runs with two faults both are named as causes, and how many there are."""
    two = [one for one in results if len(one.case.faults) == 2]
    return sum(all(set(causes) & set(one.named) for causes in one.accepted) for one in two), len(two)


def by_cause(results: Iterable[Result]) -> dict[str, dict[str, float]]:
    """Return runs, recall, precision, top-1 and top-3 of every cause that was planted or named."""
    sick, said, right = defaultdict(list), Counter[str](), Counter[str]()
    for one in results:
        if len(one.case.faults) == 1:
            sick[one.accepted[0][0]].append(one)
        if len(one.case.faults) < 2:
            said.update(one.named)
            right.update(name for name, is_right in zip(one.named, one.right, strict=True) if is_right)
    return {
        cause: {
            "runs": len(sick[cause]),
            "first": _share(one.right[:1] == [True] for one in sick[cause]),
            "third": _share(any(one.right[:3]) for one in sick[cause]),
            "named": _share(any(one.right) for one in sick[cause]),
            "precision": right[cause] / said[cause] if said[cause] else float("nan"),
        }
        for cause in sorted({*sick, *said})
    }


def confusion(results: Iterable[Result]) -> dict[tuple[str, str], int]:
    """Return how often each cause was named first for each planted one; an accepted equivalent counts as planted."""
    found: Counter[tuple[str, str]] = Counter()
    for one in results:
        if len(one.case.faults) == 1:
            planted = one.accepted[0][0]
            first = "nothing" if not one.named else planted if one.right[0] else one.named[0]
            found[planted, first] += 1
        elif not one.case.faults:
            found["healthy", one.named[0] if one.named else "nothing"] += 1
    return dict(found)


def delays(results: Sequence[Result]) -> list[int]:
    """Return the steps between a fault's beginning and the look at which it was first named."""
    return [one.caught - one.onset for one in results if len(one.case.faults) == 1 and one.caught is not None]


@dataclass(frozen=True)
class Onsets:
    """How well the beginning of a fault is found, over runs of which the fault is named."""

    runs: int
    error: float
    """Median number of steps between what is said and the truth"""
    within: float
    """Share of the runs in which it is at most 5 steps"""
    covered: float
    """Share of the intervals that hold the true step"""
    width: float
    """Median number of steps of the intervals"""


def onsets(results: Iterable[Result]) -> Onsets:
    """Return how well the beginning is found in runs with one fault."""
    said = [one for one in results if len(one.case.faults) == 1 and one.since is not None]
    errors = [abs(one.since - one.onset) for one in said if one.since is not None]
    intervals = [(one.onset, *one.between) for one in said if one.between is not None]
    return Onsets(
        len(said),
        statistics.median(errors) if errors else float("nan"),
        _share(error <= 5 for error in errors),
        _share(low <= onset <= high for onset, low, high in intervals),
        statistics.median(high - low + 1 for _, low, high in intervals) if intervals else float("nan"),
    )


def in_time(results: Iterable[Result]) -> tuple[int, int]:
    """Return in how many runs the fault was named before the true reward fell, and in how many it fell."""
    fell = [one for one in results if len(one.case.faults) == 1 and one.fell is not None]
    return sum(one.caught is not None and one.fell is not None and one.caught <= one.fell for one in fell), len(fell)
