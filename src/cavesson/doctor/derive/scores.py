"""How far the log-probabilities of training are from those of scoring, where no trainer measured it."""

from typing import TYPE_CHECKING

import numpy as np

from cavesson.doctor.derive.derivation import Found, derivation
from cavesson.doctor.series import Series

if TYPE_CHECKING:
    from cavesson.doctor.data import RunData


@derivation(
    gives=["steps.policy/first_approx_kl"],
    needs=["steps.policy/approx_kl", "tokens.logprob", "tokens.ref_logprob"],
    how="the update of the first step beside the distance from the reference at the next",
)
def distance_before_training(data: "RunData") -> Found:
    """Return the part of the first step's approximate KL that the policy's movement does not explain.

    Let π₀ score the first step's responses and π₁ those of the next. On the way from π₀ to π₁, no pass of the update
    differs more from π₀ than π₁ does, and π₁ differs from π₀ by at most its distance from the reference plus that of
    π₀ (the triangle inequality of the root mean square). What training measures beyond that is there before the first
    update. It is a lower bound: it can show a difference, but never its absence.
    """
    sample, updates = data.sample, data.metric("policy/approx_kl")
    distance = sample.mean_by_step(sample["kl_k1"] ** 2 / 2)
    first = data.rows.steps[0]
    starts = first <= 1 and len(updates) and updates.step[0] == first
    if not starts or distance.step[:2].tolist() != [first, first + 1] or not _moved_once(data, int(first)):
        return None
    before, after = np.sqrt(2 * distance.value[:2])
    left = float(np.sqrt(2 * max(updates.value[0], 0.0)) - before - after)
    # Unless the next step is further from the reference, its responses may be of the initial policy as well.
    if after <= before or left <= 0:
        return None
    return {"steps.policy/first_approx_kl": Series(updates.step[:1], np.array([left**2 / 2]))}


def _moved_once(data: "RunData", first: int) -> bool:
    """Return whether the first step is of the initial policy and the next of a later one, as far as it is known."""
    version = data.rows["policy_version"]
    now, then = (version[data.rows.step == step] for step in (first, first + 1))
    return not (np.any(now > 0) or np.any(then <= 0))
