"""Readings that several rules share: of a metric that spikes, and of a series that exceeds a limit or shrinks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.groups import beside, kind_effects, without_means
from cavesson.doctor.onset import of_events
from cavesson.doctor.reading import Curve, Reading
from cavesson.doctor.recorded import CHANCE
from cavesson.doctor.rows import Rows
from cavesson.doctor.series import Array, Series, earliest, over_median, since, smoothed, trend
from cavesson.findings.words import Phrase, Share

HIGH = 10.0
"""Times the median of the steps before."""
APART = 4.0
"""Without a trend, the standard errors by which the means before and after a fall must differ."""
MIN_SPIKES, MIN_SHARE = 4, Share(0.1)
"""Number of spikes, and their share of the steps from the first one on: a single spike is one unusual batch."""


def spikes(data: RunData, metric: str, limit: float, steps: int, often: float, smallest: float = 0.0) -> Reading:
    """Return how far a metric rises above its running median; unhealthy if it often exceeds ``limit`` times it.

    Args:
        data: The run.
        metric: Name of the metric.
        limit: Times the median above which a value is a spike.
        steps: Number of spikes from which they are often.
        often: Share of the steps from the first spike on that they must have, too.
        smallest: Values up to this are not spikes.
    """
    points = data.metric(metric)
    over = np.nan_to_num(over_median(points))
    bad = points.step[(over > limit) & (points.value > smallest)]
    first = earliest(bad)
    unhealthy = first is not None and len(bad) >= max(steps, often * len(points.after(first)))
    curve = Curve(Series(points.step, over), high=limit)
    between = of_events(points, bad)
    return Reading(float(over.max(initial=0)), unhealthy, first, data.step_evidence(bad), curve=curve, between=between)


def exceeding(
    data: RunData, points: Series, first: int | None, high: float, statistic: Callable[[Array], Any] = np.median
) -> Reading:
    """Return how large a series is where it exceeds a limit.

    Args:
        data: The run.
        points: The series.
        first: The step from which it exceeds the limit; None if it does not for long, and the reading is where it ends.
        high: The limit; the number seen is a share if the limit is one.
        statistic: Of the values above the limit, from this step on.
    """
    later = points.after(first).value
    value = points.last() if first is None else float(statistic(later[later > high]))
    seen = Share(value) if isinstance(high, Share) else value
    return Reading(seen, first is not None, first, data.step_evidence([first]), curve=Curve(points, high=high))


def exceeds(data: RunData, count: float, of: float, limit: float) -> bool:
    """Return whether a share is above its limit; in a part of a run, by more than chance explains."""
    above = bool(of) and count / of > limit
    return above and (data.whole is data or at_least(count, of, limit) < data.chance)


def at_least(count: float, of: float, share: float) -> float:
    """Return the probability of so many or more successes of a share's chance each (a binomial distribution)."""
    from scipy import special  # slow to import; only long runs need it

    return float(special.bdtrc(count - 1, of, share))


def is_clear(data: RunData, points: Series) -> bool:
    """Return whether chance does not explain the trend of a series; only asked of a part of a run."""
    return data.whole is data or trend(points).p < data.chance


def is_lower(data: RunData, points: Series, since: int) -> bool:
    """Return whether chance does not explain that a series is lower from a step on than before it.

    A trend shows that. A sudden fall is a weak trend, so in a whole run it is enough if the means before and after it
    differ by several standard errors.
    """
    found = trend(points)
    if found.change < 0 and found.p < data.chance:
        return True
    begin = max(3, int(np.searchsorted(points.step, since)))  # a running median is low before the fall, too
    before, after = points.value[:begin], points.value[begin:]
    if data.whole is not data or not len(after):
        return False
    error = noise_of(points) * np.sqrt(1 / len(before) + 1 / len(after))
    return bool(before.mean() - after.mean() > APART * error)


def is_higher(data: RunData, points: Series, since: int) -> bool:
    """Return whether chance does not explain that a series is higher from a step on than before it."""
    return is_lower(data, Series(points.step, -points.value), since)


def noise_of(points: Series) -> float:
    """Return the standard deviation of the noise of a series, from its changes from step to step."""
    return float(np.sqrt(np.mean(np.diff(points.value) ** 2) / 2))


DIGITS = 9
"""Decimal places from which a difference is that of a sum in another order."""


class Lengths(NamedTuple):
    """How long responses are."""

    rows: Rows
    """The rollouts: those whose turns are known, if a run has turns."""
    each: Array
    """[n] in characters if no tokens were counted"""
    kind: Array
    """[n] number of the kind of each response: the same for episodes whose turns and calls are the same"""
    unit: Phrase
    mean: Phrase
    """What a mean of them is called."""

    def by_step(self, statistic: Callable[[Array], Any] = np.mean) -> Series:
        """Return a statistic of the lengths of each step, as if its episodes were of the same kinds as all of them."""
        if not self.kind.any():  # all are of one kind
            return self.rows.by_step(self.each, statistic)
        return self.rows.by_step(self.each - kind_effects(self.each, self.kind, self.rows.step), statistic)

    def within(self, values: Array) -> Array:
        """Return [n] the values minus the means of their groups or steps, and of their kinds."""
        keys = [beside(self.rows, values), *([self.kind] if self.kind.any() else [])]
        return np.round(without_means(values, keys), DIGITS)


def lengths(data: RunData) -> Lengths:
    """Return how long responses are; of episodes, how long they are per turn of the policy.

    Episodes grow as a policy learns to call tools. Their turns need not: a call has the length that its tool asks for,
    and is longer or shorter than an answer. So only episodes of one kind tell whether a policy writes more.
    """
    has_tokens, has_turns = data.has("rows.length"), data.recorded("rows.turns")
    rows = data.turns.rows if data.recorded("turns.role") else data.rows
    each, kind = rows["length" if has_tokens else "characters"], np.zeros(len(rows), np.int64)
    if has_turns:
        turns = rows["turns"]
        each, kind = each / np.where(turns > 1, turns, 1), np.unique(turns, return_inverse=True)[1]
    if data.recorded("turns.role"):
        kind = data.turns.shape
    return Lengths(rows, each, kind, *_UNITS[has_tokens, has_turns])


_UNITS = {
    (True, False): (Phrase("tokens"), Phrase("mean length in tokens")),
    (False, False): (Phrase("characters"), Phrase("mean length in characters")),
    (True, True): (Phrase("tokens per turn"), Phrase("mean length of a turn in tokens")),
    (False, True): (Phrase("characters per turn"), Phrase("mean length of a turn in characters")),
}
"""The names of lengths, by whether tokens were counted, and whether responses are episodes."""


def collapse(data: RunData, points: Series, limit: float) -> Reading | None:
    """Return where a series ends; unhealthy if that is below ``limit`` times its start, and not by chance."""
    if len(points) < 8:
        return None
    before = points.first()
    unhealthy = points.last() < limit * before and trend(points).p < data.chance
    first = since(points, points.value < 0.8 * before, 3)
    evidence = data.step_evidence(points.step[-1:])
    return Reading(points.last(), unhealthy, first, evidence, {"before": before}, Curve(points, low=limit * before))


def pays(data: RunData) -> bool:
    """Return whether the reward is still near its maximum and well above its start."""
    if not data.has("rows.reward"):
        return False
    reward = smoothed(data.rows.mean("reward"))
    if len(reward) < 5:
        return False
    gain = reward.value.max() - reward.first()
    rises = trend(data.rows.mean("reward")).p < CHANCE
    return bool(rises and reward.last() - reward.first() > 0.8 * gain and gain > 0.3 * np.nanstd(data.rows["reward"]))
