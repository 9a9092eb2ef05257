"""Steps at which a metric is far above its running median."""

import numpy as np

from cavesson.doctor.data import RunData
from cavesson.doctor.finding import Curve, Reading
from cavesson.doctor.series import Series, earliest, over_median

HIGH = 10.0
"""Times the median of the steps before."""
LEAST, OFTEN = 4, 0.1
"""So many spikes, and so large a share of the steps from the first one on: a single spike is one batch, no trouble."""


def spikes(data: RunData, metric: str, least: float = 0.0) -> Reading:
    """Return how far a metric rises above its running median; unhealthy if it is often above ``HIGH`` times the median.

    Values up to ``least`` do not count as spikes.
    """
    points = data.metric(metric)
    over = np.nan_to_num(over_median(points))
    bad = points.step[(over > HIGH) & (points.value > least)]
    first = earliest(bad)
    return Reading(
        float(over.max(initial=0)),
        first is not None and len(bad) >= max(LEAST, OFTEN * float(np.sum(points.step >= first))),
        first,
        data.step_evidence(bad[:3]),
        curve=Curve(Series(points.step, over), high=HIGH),
    )
