"""How much more reward the responses with a pattern get: one number for the board and the doctor."""

from typing import NamedTuple

import numpy as np

from cavesson.sorted_arrays import Array


class RewardEffect(NamedTuple):
    """What patterns do to the reward, among responses that are compared with each other, such as those of a step."""

    value: Array
    """Mean reward with a pattern − without it; NaN where no responses can be compared."""
    error: Array
    """Its standard error."""
    in_sd: Array
    """The value in standard deviations of the reward among responses that are compared."""


def reward_effect(total: Array, weight: Array, squares: float, scored: float) -> RewardEffect:
    """Compute the effects of patterns from sums over the responses with a reward.

    If the mean of those that are compared is subtracted from each reward, those with a pattern sum to S and those
    without it to −S. The difference of the means is S / n₁ + S / n₀ = S · n / (n₁ n₀), and its variance is that of a
    reward times n / (n₁ n₀).

    Args:
        total: S, summed over the groups of responses that are compared.
        weight: Σ n₁ n₀ / n, as ``effect_weight``.
        squares: Sum of the squares of the rewards − their means, of all responses.
        scored: How many responses have a reward.
    """
    with np.errstate(all="ignore"):
        value = total / weight
        variance = np.maximum(squares - value**2 * weight, 0) / scored
        return RewardEffect(value, np.sqrt(variance / weight), value / np.sqrt(squares / scored))


def effect_weight(having: Array, scored: Array) -> Array:
    """Return Σ n₁ n₀ / n over groups, [..., G], with n₁ responses that have a pattern among n with a reward."""
    return np.asarray((having * (scored - having) / np.maximum(scored, 1)).sum(axis=-1))
