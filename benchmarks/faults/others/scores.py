"""Numbers from what was said: how often the doctor is right, for each way of recording."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.faults.others.judged import Judged

NAN = float("nan")


@dataclass(frozen=True)
class Score:
    """How the doctor does on some recordings, all of them of one way."""

    determined: int
    """Recordings whose columns determine the fault."""
    first: float
    """Share of these of which a right cause is named first."""
    named: float
    """Share of these of which a right cause is named at all."""
    precision: float
    """Share of the names, on all recordings, that are true."""
    healthy_steps: int
    alarms: float
    """Names per 1,000 steps of healthy runs."""
    onsets: tuple[int, ...]
    """By how many steps the beginning of each fault that began late was missed, whatever the direction."""
    undetermined: int
    """Recordings whose columns do not determine the fault."""
    not_excluded: float
    """Share of these of which the doctor says that the fault cannot be excluded."""

    @property
    def onset(self) -> float:
        """The median of ``onsets``."""
        return median(self.onsets) if self.onsets else NAN


def score(said: Iterable[Judged]) -> Score:
    """Return the score of recordings of faulty and healthy runs."""
    every = list(said)
    healthy = [one for one in every if one.case.healthy]
    shown = [one for one in every if one.determined]
    hidden = [one for one in every if not one.case.healthy and not one.determined]
    true = [name in one.true for one in every for name in one.named]
    steps = sum(one.steps for one in healthy)
    alarms = sum(len(one.named) for one in healthy)
    late = [one for one in shown if one.onset > 0 and one.since is not None]
    return Score(
        determined=len(shown),
        first=_share([one.named[:1] != () and one.named[0] in one.causes for one in shown]),
        named=_share([bool(set(one.named) & set(one.causes)) for one in shown]),
        precision=_share(true),
        healthy_steps=steps,
        alarms=1000 * alarms / steps if steps else NAN,
        onsets=tuple(sorted(abs(one.since - one.onset) for one in late if one.since is not None)),
        undetermined=len(hidden),
        not_excluded=_share([bool(set(one.not_excluded) & set(one.causes)) for one in hidden]),
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else NAN
